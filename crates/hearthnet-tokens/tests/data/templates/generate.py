#!/usr/bin/env python3
"""Writes expected.json: output of Jinja2, configured as in transformers' apply_chat_template; see README.md.

usage: generate.py FOLDER > expected.json          FOLDER has llama.cpp's models/templates
       generate.py FOLDER TEMPLATE CONVERSATION    shows one text
"""
import hashlib
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = 1785196800  # 2026-07-28 00:00:00 UTC

# Templates of supported families: their texts are stored whole. For the others, hashes are stored.
FAMILIES = [
    "HuggingFaceTB-SmolLM3-3B", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-Coder",
    "GLM-4.6", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-2-2b-it", "ibm-granite-granite-3.3-2B-Instruct", "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct", "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Ministral-3-14B-Reasoning-2512", "mistralai-Mistral-Nemo-Instruct-2407",
    "mistralai-Mistral-Small-3.2-24B-Instruct-2506", "openai-gpt-oss-120b", "openbmb-MiniCPM5-1B",
]

# Families without a template in that folder; these templates follow the shape of their own.
SHAPES = {
    "olmoe": """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] }}
{% elif message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "mixtral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}
""",
    "phi-4": """{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    "gemma-3": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim if item['type'] == 'text' else '<start_of_image>' }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
""",
    "minicpm3": """{%- macro json_to_python_type(json_spec) %}
{%- set basic = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if basic[json_spec.type] is defined %}
    {{- basic[json_spec.type] }}
{%- elif json_spec.type == "array" %}
    {{- "List[" + json_to_python_type(json_spec["items"]) + "]" }}
{%- elif json_spec.type == "object" %}
    {{- "Dict[str, " + json_to_python_type(json_spec.additionalProperties or {"type": "any"}) + ']' }}
{%- elif json_spec.type is iterable and json_spec.type is not string %}
    {{- "Union[" }}
    {%- for t in json_spec.type %}
      {{- json_to_python_type({"type": t}) }}
      {%- if not loop.last %}
        {{- "," }}
    {%- endif %}
    {%- endfor %}
    {{- "]" }}
{%- else %}
    {{- "Any" }}
{%- endif %}
{%- endmacro %}

{%- for message in messages %}
    {%- if loop.first and tools %}
        {{- '<|im_start|>system\\n# Functions\\n' }}
        {%- for tool in tools %}
            {%- set fun = tool.function | default(tool) %}
            {{- "def " + fun.name + "(" }}
            {%- for name, spec in fun.parameters.properties.items() | list %}
                {{- name + ": " + json_to_python_type(spec) }}
                {%- if name not in fun.parameters.required | default([]) %}
                    {{- " = None" }}
                {%- endif %}
                {{- ", " if not loop.last else "" }}
            {%- endfor %}
            {{- '):\\n    \"\"\"' + fun.description.strip() + '\"\"\"\\n' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == "assistant" and message.tool_calls is defined %}
        {{- '<|im_start|>assistant\\n<|tool_call_start|>\\n```python\\n' }}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}
            {{- call.name ~ "(" }}
            {%- for name, value in call.arguments | dictsort %}
                {{- name ~ "=" ~ (("'" ~ value | replace("'", "\\\\'") ~ "'") if value is string else value | string) }}
                {{- "," if not loop.last }}
            {%- endfor %}
            {{- ")\\n" }}
        {%- endfor %}
        {{- '```\\n<|tool_call_end|>\\n<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>%s\\n%s<|im_end|>\\n' | format(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
}


def call(name, arguments, id="call12345"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, description, properties, required):
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = tool("get_weather", "The weather of a town.", {"town": {"type": "string", "description": "Its name."}}, ["town"])
SEARCH = tool("search", "Finds \"pages\" <quickly> & well:\n'é' 日本.", {
    "query": {"type": "string"},
    "limit": {"type": "integer", "description": "How many.", "default": 10, "minimum": 1},
    "exact": {"type": "boolean", "default": False},
    "score": {"type": ["number", "null"]},
    "kind": {"type": "string", "enum": ["news", "images"], "default": "news"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "area": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lat"]},
    "when": {"oneOf": [{"type": "string"}, {"type": "integer", "description": "Unix time."}]},
}, ["query"])

SYSTEM = {"role": "system", "content": "Be brief.\n"}
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
ASK = {"role": "user", "content": "Is it warm in Oslo?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {"town": "Oslo"})]}
RESULT = {"role": "tool", "content": '{"celsius": -3.5, "sky": "<clear> é"}', "name": "get_weather", "tool_call_id": "call12345"}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "Two and two.\nEasy."}

# Variables of each template besides the tokens and `add_generation_prompt` (true unless given).
CONVERSATIONS = {
    "question": {"messages": [ASK]},
    "system": {"messages": [SYSTEM, *HI, ASK]},
    "finished": {"messages": [*HI, ASK, {"role": "assistant", "content": " No.\n"}], "add_generation_prompt": False},
    "odd_text": {"messages": [
        {"role": "user", "content": "  \n \"two\"  'lines' {{ x }} {% y %}\n\ttab \\ <b>&amp;</b>\u00a0日本語 👩‍💻 \x85 é\r\n"},
        {"role": "assistant", "content": ""}, {"role": "user", "content": ""}]},
    "wrong_order": {"messages": [HI[1], HI[1], SYSTEM]},
    "tools": {"messages": [SYSTEM, ASK], "tools": [WEATHER]},
    "many_tools": {"messages": [ASK], "tools": [WEATHER, SEARCH]},
    "tool_call": {"messages": [ASK, CALL], "tools": [WEATHER], "add_generation_prompt": False},
    "tool_result": {"messages": [SYSTEM, ASK, CALL, RESULT], "tools": [WEATHER]},
    "tool_answer": {"messages": [
        ASK, {**CALL, "content": "I look."}, RESULT, {"role": "assistant", "content": "No, it is cold."},
        {"role": "user", "content": "Thanks."}], "tools": [WEATHER, SEARCH]},
    "tool_calls": {"messages": [
        ASK, {"role": "assistant", "content": "", "reasoning_content": "Both at once.", "tool_calls": [
            call("get_weather", {"town": "Oslo"}),
            call("search", {"query": "é \"q\" <x> & 'y'", "limit": 3, "exact": True, "score": 1.5, "tags": ["a", "b"],
                            "area": {"lat": 59.9, "lon": None}}, "call67890")]},
        RESULT, {**RESULT, "name": "search", "content": "nothing", "tool_call_id": "call67890"}], "tools": [WEATHER, SEARCH]},
    "thought": {"messages": [{"role": "user", "content": "2+2?"}, THOUGHT, {"role": "user", "content": "And 3?"}]},
    "thinking": {"messages": [SYSTEM, ASK], "enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    "not_thinking": {"messages": [SYSTEM, {"role": "user", "content": "2+2?"}, THOUGHT, ASK],
                     "enable_thinking": False, "thinking": False, "reasoning_effort": "low"},
    "thinking_tools": {"messages": [ASK, {**CALL, "reasoning_content": "I cannot know."}, RESULT], "tools": [WEATHER],
                       "enable_thinking": True, "thinking": True},
    "written_thought": {"messages": [
        {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"}, ASK]},
    "last_thought": {"messages": [{"role": "user", "content": "2+2?"}, THOUGHT], "add_generation_prompt": False},
}


class Generation(Extension):
    """`{% generation %}` marks the model's text, and writes its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.fromtimestamp(NOW, timezone.utc).strftime(form)
    return env


def given(message):
    """A message as templates get it: transformers defines the reasoning under two names."""
    message = dict(message)
    if "reasoning_content" in message:
        message["thinking"] = message["reasoning_content"]
    return message


def render(template, conversation):
    """The text; or {"refused": ...} if the template refuses, or {"failed": ...} if it fails."""
    variables = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", **conversation}
    variables["messages"] = [given(message) for message in conversation["messages"]]
    try:
        return template.render(variables)
    except Exception as error:
        kind = "refused" if type(error) is jinja2.exceptions.TemplateError else "failed"
        return {kind: str(error)}


def main():
    folder = Path(sys.argv[1])
    sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    env = environment()
    if len(sys.argv) > 3:
        print(render(env.from_string((sources | SHAPES)[sys.argv[2]]), CONVERSATIONS[sys.argv[3]]))
        return
    cases = {}
    for name, source in (sources | SHAPES).items():
        cases[name] = {}
        template = env.from_string(source)
        for conversation, content in CONVERSATIONS.items():
            text = render(template, content)
            if isinstance(text, str) and name not in FAMILIES and name not in SHAPES:
                text = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
            cases[name][conversation] = text
    print(json.dumps({"now": NOW, "shapes": SHAPES, "conversations": CONVERSATIONS, "cases": cases}, indent=0, ensure_ascii=False))


if __name__ == "__main__":
    main()
