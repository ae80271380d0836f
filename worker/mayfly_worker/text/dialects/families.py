"""The dialects of all families of models: how tool calls begin and end, and what reads them."""

from __future__ import annotations

from functools import partial
from types import ModuleType

from mlx_lm.tool_parsers import (
    function_gemma,
    gemma4,
    glm47,
    json_tools,
    kimi_k2,
    kimi_k3,
    laguna,
    longcat,
    minicpm5,
    minimax_m2,
    mistral,
    muse_spark,
    pythonic,
    qwen3_coder,
)

from mayfly_worker.text.dialects import harmony, json_calls, markup_readers, python_calls
from mayfly_worker.text.dialects.call_readers import (
    ParseCalls,
    Reader,
    read_function_gemma,
    read_gemma4,
)
from mayfly_worker.text.dialects.dialect import Dialect
from mayfly_worker.text.dialects.json_calls import read_json_calls
from mayfly_worker.text.dialects.markup_readers import MARKUPS, Markup, parse_markup, read_markup

FORCED = Dialect(name="forced", parse=json_calls.parse_json_calls, read=read_json_calls)
"""Form of the calls that a grammar enforces, whatever the model's own form is: a JSON list, and
nothing else, without markers."""


def _mlx_lm(
    module: ModuleType,
    form: Markup | Reader,
    *words: tuple[str, ...],
    parse: ParseCalls | None = None,
    kept: tuple[str, ...] = (),
    tokens: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> Dialect:
    """Returns the dialect that a parser of mlx-lm reads. ``form`` is its reader, or describes its
    markers; ``parse`` replaces mlx-lm's function where models write more than this function
    reads."""
    start, end = module.tool_call_start, module.tool_call_end
    whole: ParseCalls = module.parse_tool_call
    if isinstance(form, Markup):
        whole = partial(parse_markup, whole, form)
        form = partial(read_markup, form)
    return Dialect(
        name=module.__name__.rpartition(".")[2],
        parse=parse or whole,
        read=form,
        starts=(start,),
        kept=kept,
        ends=(end,) if end else (),
        words=words,
        json=module in (json_tools, kimi_k2),
        tokens=tokens,
        aliases=aliases,
    )


def _json(
    name: str, start: str, end: str, *words: tuple[str, ...], aliases: tuple[str, ...] = ()
) -> Dialect:
    """Returns a dialect whose calls are JSON between two markers or, without an ``end``, after
    one."""
    return Dialect(
        name=name,
        parse=json_calls.parse_json_calls,
        read=partial(read_json_calls, tail=not end),
        starts=(start,),
        ends=(end,) if end else (),
        json=True,
        words=words,
        aliases=aliases,
    )


IN_ORDER = (
    # Words that no other family's templates have
    harmony.CALLS,
    Dialect(
        name="deepseek_v32",
        parse=markup_readers.parse_dsml,
        read=partial(read_markup, MARKUPS["deepseek_v32"]),
        starts=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        ends=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        words=(("｜DSML｜",),),
        tokens=("｜DSML｜",),
        aliases=("deepseek_v4",),
    ),
    Dialect(
        name="deepseek_v3",
        parse=partial(json_calls.parse_headed, json_calls.DEEPSEEK),
        read=partial(json_calls.read_headed, json_calls.DEEPSEEK),
        starts=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ends=("<｜tool▁calls▁end｜>",),
        json=True,
        words=(("<｜tool▁call▁begin｜>",),),
        aliases=("deepseek_v31",),
    ),
    _mlx_lm(minimax_m2, MARKUPS["minimax_m2"], ("<minimax:tool_call>",)),
    _mlx_lm(gemma4, read_gemma4, ("<|tool_call>", "<tool_call|>")),
    _mlx_lm(
        function_gemma,
        read_function_gemma,
        ("<start_function_call>",),
        aliases=("functiongemma",),
    ),
    _mlx_lm(
        longcat,
        markup_readers.read_longcat,
        ("<longcat_tool_call>",),
        parse=markup_readers.parse_longcat,
    ),
    _mlx_lm(kimi_k3, MARKUPS["kimi_k3"], tokens=("<|open|>", "<|close|>", "<|sep|>")),
    _mlx_lm(
        kimi_k2,
        partial(json_calls.read_headed, json_calls.KIMI_K2),
        ("<|tool_calls_section_begin|>",),
        parse=partial(json_calls.parse_headed, json_calls.KIMI_K2),
    ),
    _mlx_lm(muse_spark, MARKUPS["muse_spark"], ("<atem:function_calls>",)),
    Dialect(
        name="seed_oss",
        parse=markup_readers.parse_functions,
        read=partial(read_markup, MARKUPS["qwen3_coder"]),
        starts=("<seed:tool_call>",),
        ends=("</seed:tool_call>",),
        words=(("<seed:tool_call>",),),
    ),
    Dialect(
        name="apertus",
        parse=json_calls.parse_apertus,
        read=json_calls.read_apertus,
        starts=("<|tools_prefix|>",),
        ends=("<|tools_suffix|>",),
        json=True,
        words=(("<|tools_prefix|>",),),
    ),
    _json(
        "command_a",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        ("<|START_ACTION|>",),
        aliases=("cohere_command3", "cohere_command4"),
    ),
    _json(
        "nemotron_nano_v2", "<TOOLCALL>", "</TOOLCALL>", ("<TOOLCALL>",), aliases=("nemotron_json",)
    ),
    _json(
        "internlm2",
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        ("<|plugin|>",),
        aliases=("internlm",),
    ),
    _json("granite_20b", "<function_call>", "", ("<|function_call_library|>",)),
    Dialect(
        name="gigachat3",
        parse=json_calls.parse_json_calls,
        read=partial(read_json_calls, tail=True),
        starts=("function call<|role_sep|>", "<|function_call|>"),
        words=(("function call", "<|role_sep|>"),),
    ),
    Dialect(
        name="functionary",
        parse=partial(json_calls.parse_headed, json_calls.FUNCTIONARY),
        read=partial(json_calls.read_headed, json_calls.FUNCTIONARY),
        starts=("<function=",),
        ends=("</function>",),
        json=True,
        words=(("<{start_tag}={function_name}>",),),
    ),
    Dialect(
        name="minimax_m3",
        parse=markup_readers.parse_minimax_m3,
        starts=("]<]minimax[>[<tool_call>",),
        ends=("]<]minimax[>[</tool_call>",),
        words=(("]<]minimax[>[",),),
    ),
    _mlx_lm(
        pythonic,
        python_calls.read_lfm2,
        ("<|tool_list_start|>",),
        ("<|tool_call_start|>",),
        parse=python_calls.parse_lfm2,
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        aliases=("lfm2",),
    ),
    Dialect(
        name="olmo3",
        parse=python_calls.parse_python_calls,
        read=python_calls.read_python_calls,
        starts=("<function_calls>",),
        ends=("</function_calls>",),
        words=(("<function_calls>",),),
    ),
    _mlx_lm(
        mistral,
        json_calls.read_mistral,
        ("[TOOL_CALLS]",),
        parse=json_calls.parse_mistral,
    ),
    Dialect(
        name="solar_open",
        parse=partial(json_calls.parse_headed, json_calls.SOLAR),
        read=partial(json_calls.read_headed, json_calls.SOLAR),
        starts=("<|tool_calls|>",),
        ends=("<|calls|>",),
        json=True,
        words=(("<|tool_call:args|>",),),
    ),
    # Words that several families' templates have
    Dialect(
        name="hunyuan",
        parse=json_calls.parse_hunyuan,
        read=json_calls.read_hunyuan,
        starts=("<tool_calls>",),
        ends=("</tool_calls>",),
        json=True,
        words=(("<tool_calls>",),),
        aliases=("hunyuan_a13b", "jamba", "minimax"),
    ),
    _mlx_lm(glm47, MARKUPS["glm47"], ("<arg_key>",), aliases=("glm45",)),
    _mlx_lm(laguna, MARKUPS["glm47"]),
    _mlx_lm(
        qwen3_coder,
        MARKUPS["qwen3_coder"],
        ("<tool_call>\n<function=",),
        ("<tool_call>\\n<function=",),
        parse=markup_readers.parse_functions,
        kept=("<function=",),
        aliases=("qwen3_xml",),
    ),
    _mlx_lm(minicpm5, MARKUPS["minicpm5"], ('<function name="', '<param name="')),
    Dialect(
        name="phi4_mini",
        parse=partial(json_calls.parse_after, "functools"),
        read=partial(json_calls.read_after, "functools"),
        starts=("<|tool_call|>",),
        ends=("<|/tool_call|>",),
        bare=("functools[",),
        json=True,
        words=(("<|/tool|>",), ("functools[",)),
        aliases=("phi4_mini_json",),
    ),
    _mlx_lm(
        json_tools,
        read_json_calls,
        ("<tool_call>", "tool_call.name"),
        ("<tool_call>", '"arguments'),
        parse=json_calls.parse_json_calls,
        aliases=("hermes", "granite4", "qwen25"),
    ),
    _json(
        "granite", "<|tool_call|>", "", ("<|tool_call|>",), ("<|start_of_role|>available_tools",)
    ),
    Dialect(
        name="llama4_pythonic",
        parse=python_calls.parse_python_calls,
        read=python_calls.read_bare_list,
        bare=("[",),
        words=(("[func_name1(param",),),
        aliases=("llama3_pythonic",),
    ),
    Dialect(
        name="llama3_json",
        parse=python_calls.parse_llama3,
        read=python_calls.read_llama3,
        starts=("<|python_tag|>",),
        bare=("{",),
        words=(('"name": function name, "parameters"',), ("<|python_tag|>",)),
        aliases=("llama4_json", "llama3"),
    ),
    Dialect(
        name="command_r",
        parse=partial(json_calls.parse_after, "Action:"),
        read=partial(json_calls.read_after, "Action:"),
        bare=("Action:",),
        words=(("Action:", "tool_name"),),
    ),
)
"""Every dialect, in the order in which their words are looked for in a chat template."""

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in IN_ORDER}
"""Every dialect, by its name."""
