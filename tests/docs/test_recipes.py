"""The page of recipes has every model of its data, and a row is what the planner gives now."""

import runpy
import tomllib

from code_blocks import ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text()
DATA = tomllib.loads((ROOT / "docs" / "recipes.toml").read_text())


def test_a_row_is_what_the_planner_gives() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "model_recipes.py"))
    (model,) = [model for model in DATA["model"] if model["shape"] == "qwen3-0.6b"]
    assert script["row"](model, "int4") in PAGE.splitlines()


def test_all_models_of_the_data_are_on_the_page() -> None:
    for model in DATA["model"]:
        assert PAGE.count(f"| {model['checkpoint']} |") == 3
        assert f"{model['checkpoint']}: {model.get('measured', '')}" in PAGE or "measured" not in model
    assert all(f"| {other['family']} | {other['way']} |" in PAGE for other in DATA["other"])
