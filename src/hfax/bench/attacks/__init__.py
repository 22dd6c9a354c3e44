"""`hfax bench attack`: sends hostile requests to an OpenAI-compatible server, and measures what they do to valid ones.

Depends on nothing of hfax's server: a raw HTTP/1.1 client sends malformed requests too, and any server can be attacked.
"""
