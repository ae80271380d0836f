"""The thoughts of all families of models: the marks around reasoning and, in some, the answer."""

from __future__ import annotations

from mayfly_worker.text.dialects.dialect import Thought, Words

_RESPONSE = ("<response>", "</response>")
_ANSWER = ("<answer>", "</answer>")


def _tagged(
    name: str,
    start: str,
    end: str,
    *words: tuple[str, ...],
    answer: tuple[str, str] | None = None,
    aliases: tuple[str, ...] = (),
) -> Thought:
    """Returns a thought between two marks. It is chosen by ``words`` of the chat template; without
    these, by the marks themselves: as words or, if no template tells, as tokens."""
    return Thought(
        name=name,
        starts=(start,),
        ends=(end,),
        answer=answer,
        words=words or ((start, end),),
        tokens=() if words else (start, end),
        aliases=aliases,
    )


_THINK: Words = (("</think>",), ("</think{}>",))

THOUGHTS_IN_ORDER = (
    # Words that no other family's templates have
    _tagged("mistral", "[THINK]", "[/THINK]", aliases=("magistral",)),
    _tagged(
        "command_a",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        aliases=("cohere_command3", "cohere_command4"),
    ),
    Thought(
        name="seed_oss",
        starts=("<seed:think>",),
        ends=("</seed:think>",),
        inside=("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"),
        words=(("<seed:think>",),),
        tokens=("<seed:think>", "</seed:think>"),
    ),
    _tagged("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    _tagged("minimax_m3", "<mm:think>", "</mm:think>"),
    Thought(
        name="gemma4",
        starts=("<|channel>thought",),
        ends=("<channel|>",),
        words=(("<|channel>", "<channel|>"),),
        tokens=("<|channel>", "<channel|>"),
    ),
    Thought(
        name="kimi_k3",
        starts=("<|open|>think<|sep|>",),
        ends=("<|close|>think<|sep|>",),
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
    _tagged("longcat", "<longcat_think>", "</longcat_think>"),
    _tagged("solar_open2", "<|think:start|>", "<|think:end|>"),
    _tagged("kimi", "◁think▷", "◁/think▷", aliases=("kimi_vl",)),
    _tagged("pangu", "[unused16]", "[unused17]", ("[unused16]", "[unused17]")),
    _tagged(
        "openthinker",
        "<|begin_of_thought|>",
        "<|end_of_thought|>",
        answer=("<|begin_of_solution|>", "<|end_of_solution|>"),
    ),
    _tagged("thinking_token", "<|thinking|>", "<|/thinking|>"),
    Thought(
        name="hy_v3",
        starts=("<think:opensource>",),
        ends=("</think:opensource>",),
        words=(("<think{}>", ":opensource"),),
        tokens=("<think:opensource>", "</think:opensource>"),
    ),
    Thought(
        name="apriel",
        starts=("Here are my reasoning steps:",),
        ends=("[BEGIN FINAL RESPONSE]",),
        answer=("", "[END FINAL RESPONSE]"),
        words=(("[BEGIN FINAL RESPONSE]",),),
    ),
    Thought(
        name="granite",
        starts=("Here is my thought process:", "Here's my thought process:", "<think>"),
        ends=("Here is my response:", "Here's my response:", "</think>"),
        answer=_RESPONSE,
        words=(("Here is my thought process:",), ("<response></response>",)),
    ),
    # Words that several families' templates have
    _tagged(
        "hunyuan_a13b",
        "<think>",
        "</think>",
        ("<think>", "<answer>"),
        answer=_ANSWER,
        aliases=("hunyuan",),
    ),
    _tagged(
        "ernie45",
        "<think>",
        "</think>",
        ("</think>", "<response>", "<tool_output>"),
        answer=_RESPONSE,
    ),
    Thought(
        name="think",
        starts=("<think>",),
        ends=("</think>",),
        words=_THINK,
        tokens=("<think>", "</think>"),
        aliases=(
            *("qwen3", "glm45", "glm47", "deepseek_v3", "deepseek_v31", "deepseek_v4", "kimi_k2"),
            *("minimax_m2", "nemotron_v3", "olmo3", "step3p5", "poolside_v1", "exaone4", "holo2"),
            *("ling3", "mimo", "intern_s1", "minimax_m1", "rwkv"),
        ),
    ),
    _tagged("exaone_deep", "<thought>", "</thought>"),
    _tagged("reasoning", "<reasoning>", "</reasoning>", answer=_ANSWER),
    _tagged("thinking", "<thinking>", "</thinking>"),
    # Chosen by name only
    Thought(
        name="deepseek_r1",
        starts=("<think>",),
        ends=("</think>",),
        begins_open=True,
        aliases=("step3", "qwen3_thinking"),
    ),
)
"""Every form of thoughts, in the order in which their words are looked for in a chat template."""
