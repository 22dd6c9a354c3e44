"""The variables that a chat template reads: what a request's `chat_template_kwargs` may set.

Templates are parsed, not searched: a name in a comment, a string or an attribute is no option.
"""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

OWN_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
    }
)
"""Variables that the server sets; requests cannot override them."""
_FUNCTIONS = ("raise_exception", "strftime_now")
"""What transformers adds to jinja's own functions."""


class _Generation(jinja2.ext.Extension):
    """transformers' `{% generation %}` block, which marks a template's assistant messages."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Parse the block to its body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def template_options(templates: list[str], special_tokens: frozenset[str]) -> frozenset[str]:
    """The names that chat templates read and the server does not set; none of a template with an error.

    Args:
        templates: chat templates.
        special_tokens: names of the tokenizer's special tokens ("bos_token"), which transformers passes to templates.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.globals.update(dict.fromkeys(_FUNCTIONS))
    found: set[str] = set()
    for text in templates:
        try:
            found |= jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError:
            continue  # rendering will say so
    return frozenset(found - OWN_NAMES - special_tokens)
