"""An OpenAI-compatible HTTP server over a rollout engine: ``burnish serve`` (docs/serve.md).

protocol    what a request may hold, as OpenAI names it
prompts     from a request to the engine's prompts and sampling parameters
driver      the one thread that the engine runs in, and what it tells the event loop
detokenize  tokens to text while they come
responses   what a client is sent
app         the endpoints
listen      the server at a socket

FastAPI, pydantic and uvicorn come with the extra ``serve``; no other room imports them.
"""
