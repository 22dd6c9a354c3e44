"""`hfax doctor --backend torch_xla`: runs a small copy of a model and reads torch_xla's counters.

They count extra compilations, transfers to the host in the middle of a pass, and operations that run on the CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hfax.backends.protocol import LoadOptions
from hfax.backends.torch_xla import runtime
from hfax.backends.torch_xla.backend import BACKEND
from hfax.errors import HfaxError
from hfax.load.config import read_any_config
from hfax.patches import registry
from hfax.synthetic.inputs import make_inputs
from hfax.synthetic.shrink import shrink_config

_STEPS = 8
_MOST_PROGRAMS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings.

    Args:
        model_type, class_name: type and class of the model.
        first_call: counters of the first call: of `generate` if the model generates from ids, else of a forward pass.
        second_call: counters of a second call of the same size; nothing should be compiled.
        patches: name of each patch used, mapped to its reason.
        problems: each problem with an explanation.
    """

    model_type: str
    class_name: str
    first_call: dict[str, int]
    second_call: dict[str, int]
    patches: dict[str, str]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        """The report as text."""
        verdict = "fails" if self.problems else "works with patches" if self.patches else "works"
        lines = [f"{self.class_name} ({self.model_type}) on torch_xla, a small copy: {verdict}"]
        for name, counts in (("first call", self.first_call), ("second call", self.second_call)):
            if counts:
                lines.append(f"  {name:12} " + ", ".join(f"{count} {what}" for what, count in counts.items()))
        lines += [f"  patch {name}: {why}" for name, why in self.patches.items()]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def diagnose(model: Any, *, task: str | None = None, trust_remote_code: bool = False) -> Diagnosis:
    """Run a small copy of a model with random weights.

    Args:
        model: a Hub id, a folder, a config.json, "demo", or a transformers config.
        task: a pipeline task name, to select a class other than the config's own.
        trust_remote_code: run modelling code from the checkpoint.

    Raises:
        HfaxError: the config does not exist, or torch_xla is not available.
    """
    config = read_any_config(model, trust_remote_code)
    if (problem := BACKEND.problem()) is not None:
        raise problem
    small = BACKEND.from_config(shrink_config(config), LoadOptions(task=task, dtype="float32"), 0)
    writes = small.can_generate() and small.main_input_name == "input_ids"
    ids = np.full((1, 8), 3)

    def call() -> None:
        if writes:
            small.generate(ids, max_new_tokens=_STEPS, do_sample=False, eos_token_id=None)
        else:
            small(**make_inputs(small.module, "base").forward)

    counts: list[dict[str, int]] = []
    problems: list[str] = []
    for _ in range(2):
        before = runtime.counters()
        try:
            call()
        except HfaxError as error:
            problems.append(str(error))
            break
        except Exception as error:  # any error of the modelling code is a finding
            problems.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            break
        after = runtime.counters()
        counts.append({name: n - before.get(name, 0) for name, n in after.items() if n - before.get(name, 0)})
    if len(counts) == 2:
        if counts[0].get("compilations", 0) > _MOST_PROGRAMS:
            problems.append(
                f"{counts[0]['compilations']} programs were compiled; prefill and a decoding step need two: "
                "the model's code reads tensor values, or its shapes change from step to step."
            )
        if counts[1].get("compilations", 0):
            problems.append(f"A second call of the same size compiled {counts[1]['compilations']} programs again.")
        for name, number in counts[1].items():
            if name.startswith("aten::"):
                problems.append(f"{name} has no lowering and ran on the CPU {number} times.")
    reasons = {patch.name: patch.why for patch in registry.all_patches("torch_xla")}
    return Diagnosis(
        model_type=config.model_type,
        class_name=type(small.module).__name__,
        first_call=counts[0] if counts else {},
        second_call=counts[1] if len(counts) > 1 else {},
        patches={name: reasons.get(name, "") for name in sorted(small.patches_used)},
        problems=tuple(problems),
    )
