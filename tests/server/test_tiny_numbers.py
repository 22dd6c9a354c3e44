"""Temperatures and `top_p` too small for float32."""

from __future__ import annotations

import pytest

CHAT = [{"role": "user", "content": "What does list.append do?"}]


def post(server, **body):
    with server.client() as client:
        return client.post(
            "/v1/chat/completions", json={"model": "demo", "messages": CHAT, "max_completion_tokens": 2, **body}
        )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-5 / 2},
        {"temperature": 1e-38},
        {"temperature": 1e-45},
        {"temperature": 1e-300},
        {"top_p": 0},
        {"top_p": 1e-38},
        {"top_p": 1e-45},
        {"top_p": 1e-300, "temperature": 5},
        {"top_p": 1e-7, "top_k": 100},
        {"temperature": 1e-5, "top_p": 0.999},
        {"temperature": 1e-5},
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [{}, {"logprobs": True, "presence_penalty": 0.0}], ids=["plain", "logprobs"])
def test_tiny_numbers_mean_the_best_token(server, options, more):
    """They became 0 in float32: a wrong token, or none at all."""
    body = {"max_completion_tokens": 24, "seed": 5, **more}
    greedy = post(server, **body, temperature=0).json()["choices"]
    found = post(server, **body, **{"temperature": 1.0, **options}).json()["choices"]
    assert found == greedy
