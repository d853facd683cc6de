"""An OpenAI-compatible server with faults, which follow from a seed and a row's prompt, at the row's first try.

Each row's answer is a function of its prompt, so an answer that is wrong or another row's is seen. The server counts
which answers left it whole and which transfers it broke.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

from aiohttp import web

from tests.endpoints.openai_server import OpenAIServer, prompt_of

NO_FAULT = "none"
RESET = "reset in mid-body"
NO_JSON = "no JSON"
NO_CHOICES = "JSON without choices"
SERVER_ERROR = "500"
BUSY = "429"
BUSY_SECONDS = "429 with seconds"
BUSY_DATE = "429 with a date"
UNAVAILABLE = "503"
DELAY = "delay"
DRIP = "drip"
HANG = "no answer"
REDIRECT = "redirect"
MANY_FAULTS: Mapping[str, float] = dict.fromkeys(
    (RESET, NO_JSON, NO_CHOICES, SERVER_ERROR, UNAVAILABLE, DELAY, DRIP, REDIRECT), 0.01
) | dict.fromkeys((BUSY, BUSY_SECONDS, BUSY_DATE), 0.001)
"""The share of rows whose first try has each fault. Throttled tries come in storms."""
_THROTTLED = (BUSY, BUSY_SECONDS, BUSY_DATE)
_DRIP_S = 0.005


@dataclass
class FaultyServer(OpenAIServer):
    """Fields may be changed while it runs."""

    faults: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    fails: frozenset[str] = frozenset()
    """Prompts that are always answered 500."""
    refuses_prompts: frozenset[str] = frozenset()
    """Prompts that are always answered 400."""
    is_dead: bool = False
    """Every connection is reset."""
    storm_s: float = 0.2
    """For so long all requests are throttled once one is."""
    held_by: Path | None = None
    """While this file exists, one row is answered every ``held_row_s``."""
    held_row_s: float = 0.0
    tries: Counter[str] = field(default_factory=Counter)
    """By prompt, without those that came in a storm; the first has the fault that the seed says."""
    answered: Counter[str] = field(default_factory=Counter)
    """Whole good answers, by prompt."""
    broken: Counter[str] = field(default_factory=Counter)
    """Transfers that broke on their way, by prompt."""
    had: Counter[str] = field(default_factory=Counter)
    """By fault."""
    _storm: tuple[str, float] = ("", 0.0)  # its kind, and when it ends
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.is_dead:
            _cut(request)
            return web.Response()
        if not request.path.endswith("/completions"):
            return await super().handle(request)
        prompt = prompt_of(await request.json())
        fault = self._fault_of(prompt)
        self.had[fault] += 1
        try:
            if (refusal := await self._refusal(request, prompt, fault)) is not None:
                return refusal
            await self._take_turn()
            return await self._answer(request, prompt, fault)
        except (asyncio.CancelledError, ConnectionError):  # the client has gone
            self.broken[prompt] += 1
            raise

    def _fault_of(self, prompt: str) -> str:
        now_s = asyncio.get_running_loop().time()
        if prompt in self.fails:
            return SERVER_ERROR
        if now_s < self._storm[1]:
            return self._storm[0]
        self.tries[prompt] += 1
        if self.tries[prompt] > 1:
            return NO_FAULT
        rng = random.Random(f"{self.seed} {prompt}")
        weights = [1 - sum(self.faults.values()), *self.faults.values()]
        (fault,) = rng.choices([NO_FAULT, *self.faults], weights)
        if fault in _THROTTLED:
            self._storm = fault, now_s + self.storm_s
        return fault

    async def _refusal(self, request: web.Request, prompt: str, fault: str) -> web.Response | None:
        """Return what is answered instead of the model's answer."""
        if fault == REDIRECT and "again" not in request.query:
            self.tries[prompt] -= 1  # it comes again as the same try, with the same fault
            return web.Response(status=307, headers={"Location": f"{request.path}?again=1"})
        if fault == HANG:
            await asyncio.sleep(3600)
        if fault == DELAY:
            await asyncio.sleep(random.Random(prompt).uniform(0.1, 0.5))
        if prompt in self.refuses_prompts:
            return web.json_response({"error": {"message": "not this one"}}, status=400)
        match fault:
            case "500" | "503":
                return web.json_response({"error": {"message": "something broke"}}, status=int(fault))
            case "429":
                return web.json_response({"error": {"message": "too many requests"}}, status=429)
            case "429 with seconds":
                return web.Response(status=429, headers={"Retry-After": "1"})
            case "429 with a date":
                until = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
                return web.Response(status=429, headers={"Retry-After": until})
            case "no JSON":
                return web.Response(text="<html>Bad gateway</html>", content_type="application/json")
            case "JSON without choices":
                return web.json_response({"model": self.model, "choices": []})
        return None

    async def _take_turn(self) -> None:
        if self.held_by is not None:
            async with self._turn:
                if self.held_by.exists():
                    await asyncio.sleep(self.held_row_s)

    async def _answer(self, request: web.Request, prompt: str, fault: str) -> web.StreamResponse:
        whole = await super().handle(request)
        assert isinstance(whole, web.Response), "the answer is made at once"
        assert isinstance(whole.body, bytes), whole.body
        body = whole.body
        response = web.StreamResponse(status=whole.status, headers={"Content-Type": "application/json"})
        response.content_length = len(body)
        await response.prepare(request)
        if fault == RESET:
            await response.write(body[: len(body) // 2])
            self.broken[prompt] += 1
            _cut(request)
            return response
        part = 16 if fault == DRIP else len(body)
        for first in range(0, len(body), part):
            await response.write(body[first : first + part])
            if fault == DRIP:
                await asyncio.sleep(_DRIP_S)
        await response.write_eof()
        self.answered[prompt] += 1
        return response


def _cut(request: web.Request) -> None:
    """Reset the connection."""
    if request.transport is not None:
        request.transport.abort()
