"""Clients that read a stream to its end while the test kills or stops workers, and record the time
of each chunk."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from support.server import Server

QUICK_RETRIES = {
    "retry_s": 0.1,
    "retry_max_s": 0.5,
    "spacing_s": 0.1,
    "steady_s": 0.0,
    "trial_losses": 1000,
}
"""Time limits of the reaper (the workers' supervisor), in seconds, with which it replaces lost
workers at once and never gives up."""


@dataclass
class StreamedAnswer:
    """A client's answer and the times of its chunks. Ids of tool calls are kept apart, because they
    differ between equal requests; ``usage`` leaves out cached tokens for the same reason."""

    rid: str = ""
    tokens: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    finish: str | None = None
    usage: tuple[int, int, int] | None = None
    at: list[float] = field(default_factory=list)
    """The time of each chunk's arrival, in seconds on the monotonic clock."""

    def take(self, chunk: Any) -> None:
        assert self.rid in ("", chunk.id)
        self.rid = chunk.id
        self.at.append(time.monotonic())
        if (usage := chunk.usage) is not None:
            thoughts = usage.completion_tokens_details.reasoning_tokens
            self.usage = (usage.prompt_tokens, usage.completion_tokens, thoughts)
        for choice in chunk.choices:
            assert self.finish is None, "nothing comes after the end"
            self.finish = choice.finish_reason
            self.text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    self.call_ids.append(call.id)
                    self.calls.append([call.function.name, ""])
                self.calls[call.index][1] += call.function.arguments or ""
            for token in choice.logprobs.content if choice.logprobs else []:
                self.tokens.append(bytes(token.bytes))
                self.logprobs.append(token.logprob)

    def content(self) -> tuple[Any, ...]:
        return self.tokens, self.text, self.calls, self.finish, self.usage

    @property
    def gap_s(self) -> float:
        """The longest time between two successive chunks, in seconds."""
        return max(after - before for before, after in zip(self.at, self.at[1:], strict=False))


class StreamingClient(threading.Thread):
    """A thread that sends one chat request and reads its stream. The event ``began`` is set when
    the server has accepted or refused the request."""

    def __init__(self, server: Server, text: str, *, url: str = "", **body: Any) -> None:
        super().__init__(daemon=True)
        self._model = server.model
        self._client = server.client.with_options(base_url=f"{url or server.url}/v1")
        self._body = {
            "messages": [{"role": "user", "content": text}],
            "stream_options": {"include_usage": True},
            "seed": 7,
        } | body
        self.answer = StreamedAnswer()
        self.began = threading.Event()
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            stream = self._client.chat.completions.create(
                model=self._model, stream=True, **self._body
            )
            self.began.set()
            for chunk in stream:
                self.answer.take(chunk)
        except Exception as error:
            self._error = error
            self.began.set()

    @property
    def error(self) -> Exception | None:
        """The exception that ended the stream, or None. Waits until the stream has ended."""
        self.join(120)
        assert not self.is_alive(), "the stream has no end"
        return self._error

    def result(self) -> StreamedAnswer:
        if (error := self.error) is not None:
            raise error
        return self.answer
