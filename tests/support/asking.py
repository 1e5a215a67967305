"""Requests to the application of `kccl serve`, in this process."""

import asyncio

import httpx

from kccl.engine.serving.http.app import application
from kccl.engine.serving.http.service import Settings

BASE = "http://127.0.0.1:8000"


def get(app, path, *, method="GET", **request):
    async def answer():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            return await client.request(method, path, **request)

    return asyncio.run(answer())


def ask(engine, method, path, *, names=("tiny",), most_body=1 << 16, given=None, **request):
    app = application(engine, Settings(names=names, most_body=most_body), **given or {})

    async def answer():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            return await client.request(method, path, **request)

    return asyncio.run(answer())
