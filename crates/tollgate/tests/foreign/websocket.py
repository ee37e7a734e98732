"""A WebSocket server behind the gateway, and a client before it. Arguments: `serve`, or `talk ADDRESS` of the gateway."""

import asyncio
import sys

from websockets.asyncio.client import connect
from websockets.asyncio.server import serve


async def echo(socket):
    async for message in socket:
        await socket.send(message)


async def server():
    async with serve(echo, "127.0.0.1", 0) as running:
        port = running.sockets[0].getsockname()[1]
        print(f"listening 127.0.0.1:{port}", flush=True)
        await asyncio.get_running_loop().create_future()


async def client(address):
    async with connect(f"ws://{address}/socket", additional_headers={"x-api-key": "k"}) as socket:
        for message in ["hello", "x" * 100_000, b"\x00\xff" * 5_000]:
            await socket.send(message)
            assert await socket.recv() == message
        print("echoed", flush=True)
        # The second connection of the same caller is one too many.
        try:
            async with connect(f"ws://{address}/socket", additional_headers={"x-api-key": "k"}):
                print("a second one passed")
        except Exception as error:
            print(f"refused {error.response.status_code}", flush=True)
    # The first has ended: its slot is free.
    for _ in range(200):
        try:
            async with connect(f"ws://{address}/socket", additional_headers={"x-api-key": "k"}) as socket:
                await socket.send("again")
                assert await socket.recv() == "again"
                print("again", flush=True)
                return
        except Exception:
            await asyncio.sleep(0.02)


if sys.argv[1] == "serve":
    asyncio.run(server())
else:
    asyncio.run(client(sys.argv[2]))
