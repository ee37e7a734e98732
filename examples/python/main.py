"""A service that limits its callers, and a client of it that is never refused.

Needs a running server with the rules beside this file, and the client:

    pip install tollgate-client[httpx] fastapi uvicorn
    tollgate serve --rules examples/python &
    python examples/python/main.py
"""

import asyncio
import os
import socket

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response

from tollgate import AsyncClient
from tollgate.asgi import TollgateMiddleware
from tollgate.httpx import AsyncPoliteTransport

limiter = AsyncClient(os.environ.get("TOLLGATE_URL", "http://127.0.0.1:8080"), domain="shop", timeout_ms=1_000)

# The service: four requests in two seconds for each API key, and a budget of tokens for each.
app = FastAPI()
app.add_middleware(TollgateMiddleware, client=limiter)


@app.get("/answer")
async def answer(request: Request) -> Response:
    async with await limiter.reserve({"model_user": request.headers["x-api-key"]}, cost=500) as tokens:
        if not tokens:
            return Response("no tokens left", status_code=429)
        text = "42"
        await tokens.settle(len(text))  # the estimate was 500
        return Response(text)


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = "http://127.0.0.1:%d/answer" % listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve([listener]))

    # A plain client runs into the limit.
    async with httpx.AsyncClient(headers={"x-api-key": "plain"}) as plain:
        responses = await asyncio.gather(*(plain.get(url) for _ in range(6)))
    print("plain httpx:", "refused" if any(each.status_code == 429 for each in responses) else "not refused")

    # A polite one reads the response's RateLimit fields, and slows down before it.
    async with httpx.AsyncClient(headers={"x-api-key": "polite"}, transport=AsyncPoliteTransport()) as polite:
        statuses = [(await polite.get(url)).status_code for _ in range(6)]
    print("polite httpx:", "refused" if 429 in statuses else "not refused")

    remaining = (await limiter.peek({"model_user": "polite"})).remaining or 0
    print("tokens used:", 10_000 - remaining)
    server.should_exit = True
    await serving
    await limiter.close()


asyncio.run(main())
