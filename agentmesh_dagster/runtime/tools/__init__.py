"""Tools: what agents and workflows call with JSON, and which answers with JSON; `call` is the way in."""
