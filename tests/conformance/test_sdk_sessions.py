"""Sessions by way of the SDKs for Python, with a chat template that takes only a first system
message, and (in `make test-agents`) with one that takes any: parallel calls, a worker killed in the
middle of a call's arguments, an object, a picture, words, and a prompt that is too long."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.lib.tools import BetaFunctionTool
from pydantic import BaseModel

from support.agents import TEMPLATES, call, killed, png
from support.models import scripted
from support.models.scripted import ScriptedReply
from support.server import Server, serving

VERDICT = "".join(f"Reason {n}: Oslo is colder than Rome.\n" for n in range(1, 9))
MODEL = "sdks"
KEY = "none"
PICTURE = base64.b64encode(png(255, 0, 0)).decode()
TOO_LONG = "word " * 5000


class Colours(BaseModel):
    colours: list[str]


class Tools:
    """The tools of a session, and the text that was saved."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.saved = ""

    def get_weather(self, city: str) -> str:
        return f"{city}: {3 if city == 'Oslo' else 20} degrees, says {self.kind}"

    def save(self, text: str) -> str:
        self.saved = text
        return "It is saved."

    def look(self, at: str) -> Any:
        """Answers as each API takes a picture from a tool; chats take none."""
        seen = f"{at} has a picture, says {self.kind}"
        match self.kind:
            case "responses":
                image = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"}
                return [image, {"type": "input_text", "text": seen}]
            case "messages":
                source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
                return [{"type": "image", "source": source}, {"type": "text", "text": seen}]
        return seen

    def run(self, name: str, arguments: str) -> Any:
        return getattr(self, name)(**json.loads(arguments))


SCHEMAS: dict[str, dict[str, Any]] = {
    name: {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    for name, key in (("get_weather", "city"), ("save", "text"), ("look", "at"))
}


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def anthropic_client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def chat(client: openai.OpenAI, tools: Tools) -> Iterator[Any]:
    declared = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    while prompt := (yield):
        messages.append({"role": "user", "content": prompt})
        if "[colours]" in prompt:
            parsed = client.chat.completions.parse(
                model=MODEL, messages=messages, response_format=Colours
            )
            messages.append(parsed.choices[0].message)
            yield parsed.choices[0].message.parsed
            continue
        while True:
            with client.chat.completions.stream(
                model=MODEL, messages=messages, tools=declared
            ) as stream:
                message = stream.get_final_completion().choices[0].message
            messages.append(message)
            for each in message.tool_calls or []:
                content = tools.run(each.function.name, each.function.arguments)
                messages.append({"role": "tool", "tool_call_id": each.id, "content": content})
            if not message.tool_calls:
                break
        yield message.content


def responses(client: openai.OpenAI, tools: Tools) -> Iterator[Any]:
    declared = [
        {"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()
    ]
    history: list[Any] = [{"role": "developer", "content": "Be brief."}]
    while prompt := (yield):
        history.append({"role": "user", "content": prompt})
        if "[colours]" in prompt:
            parsed = client.responses.parse(model=MODEL, input=history, text_format=Colours)
            history += parsed.output
            yield parsed.output_parsed
            continue
        while True:
            with client.responses.stream(
                model=MODEL, instructions="Answer.", input=history, tools=declared
            ) as stream:
                response = stream.get_final_response()
            history += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for each in calls:
                output = tools.run(each.name, each.arguments)
                history.append(
                    {"type": "function_call_output", "call_id": each.call_id, "output": output}
                )
            if not calls:
                break
        yield response.output_text


def messages(client: anthropic.Anthropic, tools: Tools) -> Iterator[Any]:
    runnable = [
        BetaFunctionTool(getattr(tools, name), name=name, description=name, input_schema=schema)
        for name, schema in SCHEMAS.items()
    ]
    history: list[Any] = []
    while prompt := (yield):
        history.append({"role": "user", "content": prompt})
        if "[colours]" in prompt:
            parsed = client.messages.parse(
                model=MODEL, max_tokens=100, messages=history, output_format=Colours
            )
            history.append({"role": "assistant", "content": parsed.content})
            yield parsed.parsed_output
            continue
        runner = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=1000,
            system="Be brief.",
            messages=history,
            tools=runnable,
            stream=True,
        )
        for stream in runner:
            message = stream.get_final_message()
        history.append({"role": "assistant", "content": message.content})
        yield message.content[0].text


KINDS: dict[str, tuple[Callable[[str], Any], Callable[[Any, Tools], Iterator[Any]]]] = {
    "chat": (openai_client, chat),
    "responses": (openai_client, responses),
    "messages": (anthropic_client, messages),
}


@pytest.fixture(
    scope="module", params=["strict", pytest.param("lenient", marks=pytest.mark.agents)]
)
def sdks(folder: Callable[[], Path], request: pytest.FixtureRequest) -> Iterator[Server]:
    cities = "\n".join(call("get_weather", city=city) for city in ("Oslo", "Rome"))
    replies = [
        ScriptedReply("[weather]", f"I ask.\n{cities}"),
        *(
            ScriptedReply(
                f"Rome: 20 degrees, says {kind}", call("save", text=VERDICT), faults=killed(at=50)
            )
            for kind in KINDS
        ),
        ScriptedReply("It is saved.", "Oslo is colder."),
        ScriptedReply("[colours]", '{"colours":["red","blue"]}'),
        ScriptedReply("[look]", call("look", at="the wall")),
        ScriptedReply("the wall has a picture", "Too red."),
        ScriptedReply("[goodbye]", "Goodbye."),
    ]
    model = scripted.build(
        folder() / MODEL, replies, tokenizer="thinking", template=TEMPLATES[request.param]
    )
    # Of two workers one goes on at once with what the other one has lost.
    with serving(model, folder(), "--trust-remote-code", "--workers", "2") as server:
        yield server


# openai warns of what it parsed itself.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("kind", KINDS)
def test_session(sdks: Server, kind: str) -> None:
    client_of, session_of = KINDS[kind]
    losses = len(sdks.autopsies())
    tools = Tools(kind)
    with client_of(sdks.url) as client:
        session = session_of(client, tools)

        def turn(prompt: str) -> Any:
            next(session)
            return session.send(prompt)

        assert turn("[weather] Compare the two, and save it.") == "Oslo is colder."
        assert tools.saved == VERDICT
        assert len(sdks.autopsies()) == losses + 1
        assert turn("[colours] Name some.") == Colours(colours=["red", "blue"])
        assert turn("[look] What do you see?") == "Too red."
        assert turn("[goodbye]") == "Goodbye."
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as error:
            turn(TOO_LONG)
        words = "prompt is too long: " if kind == "messages" else "maximum context length is 4096"
        assert words in str(error.value)
