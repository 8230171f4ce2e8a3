"""Chat templates in the manner of published families: what they read of a turn, and how, as data."""

from __future__ import annotations

from typing import Final

_OPEN: Final = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

FAMILY_CHATS: Final[dict[str, str]] = {
    # Joins with +, which an undefined content does not survive.
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}" + _OPEN,
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "llama-2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{%- set system_message = false %}{% endif %}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if loop.index0 == 0 and system_message != false %}
{%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{%- else %}{% set content = message['content'] %}{% endif %}
{%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama-3": """{{- bos_token }}{% for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- else %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{% endif %}""",
    "mistral": """{{- bos_token }}{% set ns = namespace(index=0) %}{% for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools is not none and loop.last %}{{- "[TOOLS] " + tools | tojson + "[/TOOLS]" }}{% endif %}
        {%- set ns.index = ns.index + 1 %}{{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined %}{{- raise_exception("calls need ids") }}{% endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message.role == "assistant" %}{{- " " + message.content|trim + eos_token}}
    {%- elif message.role in ["tool", "tool_results"] %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}{% else %}{% set content = message.content %}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string }}
        {{- ', "call_id": "' + message.tool_call_id|default('') + '"}' }}
    {%- endif %}
{%- endfor %}{{- ns.index }}""",
    # Refuses ids that have not nine characters.
    "mistral-small-3.2": """{{- bos_token }}{% for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools is not none and loop.last %}{{- "[TOOLS]" + tools | tojson + "[/TOOLS]" }}{% endif %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.role == "assistant" %}
        {%- if message.get("tool_calls") %}{% for call in message.tool_calls %}
            {%- if call.id | default("") | length != 9 %}{{- raise_exception("ids have nine characters") }}{% endif %}
            {{- "[TOOL_CALLS]" + call.function.name + "[CALL_ID]" + call.id }}
            {{- "[ARGS]" + call.function.arguments | tojson }}
        {%- endfor %}{% elif message.content is string %}{{- message.content }}
        {%- else %}{% for part in message.content %}{{- part.text }}{% endfor %}{% endif %}{{- eos_token }}
    {%- elif message.role == "tool" %}{{- "[RESULT]" + message.tool_call_id + message.content | string }}{% endif %}
{%- endfor %}""",
    "devstral": """{{- bos_token }}{% for message in messages %}
    {%- if message.role == "user" %}{{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.role == "assistant" %}
        {%- if message.content is string %}{{- message.content }}{% else %}{{- message.content[0].text }}{% endif %}
        {%- if message.tool_calls is defined and message.tool_calls is not none %}{% for call in message.tool_calls %}
            {%- set arguments = call.function.arguments %}
            {%- if arguments is not string %}{% set arguments = arguments | tojson %}{% endif %}
            {{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + arguments }}
        {%- endfor %}{% endif %}{{- eos_token }}
    {%- elif message.role == "tool" %}{{- "[RESULT]" + message.content | string + "[/RESULT]" }}{% endif %}
{%- endfor %}""",
    "phi-4-mini": """{% for message in messages %}
    {%- if message.role == "tool" %}{{- "<|tool_response|>" + message.content | tojson + "<|end|>" }}
    {%- else %}{{- "<|" + message.role + "|>" }}{% if message.content %}{{- message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- "<|tool_call|>" + call.function | tojson + "<|/tool_call|>" }}
        {%- endfor %}{{- "<|end|>" }}
    {%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{- "<|assistant|>" }}{% endif %}""",
    "phi-4-mini-list": """{% for message in messages %}{{- "<|" + message.role + "|>" ~ (message.content or "") }}
    {%- if message.tool_calls %}{{- "<|tool_call|>[" }}{% for call in message.tool_calls %}
        {{- '{"name":"' + call.function.name + '","arguments":' + call.function.arguments | tojson + "}" }}
        {%- if not loop.last %}{{- "," }}{% endif %}{% endfor %}{{- "]<|/tool_call|>" }}{% endif %}{{- "<|end|>" }}
{%- endfor %}{% if add_generation_prompt %}{{- "<|assistant|>" }}{% endif %}""",
    "granite-3": """{% for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined %}
        {%- set calls = message.tool_calls | map(attribute="function") | list | tojson(indent=4) %}
        {{- "<|start|>assistant<|end|><|tool_call|>" + calls + "<|eot|>\\n" }}
    {%- elif message.role == "tool" %}{{- "<|start|>tool_response<|end|>" + message.content + "<|eot|>\\n" }}
    {%- else %}{{- "<|start|>" + message.role + "<|end|>" + message.content + "<|eot|>\\n" }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- "<|start|>assistant<|end|>" }}{% endif %}""",
    # Tells how to call, and writes no calls.
    "granite-3.3": """{% if tools %}{{- "<|start|>system<|end|>Say <|tool_call|> followed by a JSON list of tools" }}
    {{- "<|eot|>\\n<|start|>available_tools<|end|>" + tools | tojson(indent=4) + "<|eot|>\\n" }}{% endif %}
{%- for message in messages %}{{- "<|start|>" + message.role + "<|end|>" + message.content + "<|eot|>\\n" }}
    {%- if loop.last and add_generation_prompt %}{{- "<|start|>assistant<|end|>" }}{% endif %}
{%- endfor %}""",
    "command-r": """{{- bos_token }}{% for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined %}{{- "<|CHATBOT|>" }}
        {%- if message.content is defined %}{{- message.content | trim }}{% endif %}
        {{- "\\nAction:\\n```json\\n[\\n" }}
        {%- for call in message.tool_calls %}
            {{- '    {\\n        "tool_name": "' + call.function.name + '",\\n        "parameters": ' }}
            {{- call.function.arguments | tojson(indent=4) | indent(8) + "\\n    }" }}
            {%- if not loop.last %}{{- ",\\n" }}{% endif %}
        {%- endfor %}{{- "\\n]```\\n" }}
    {%- elif message.role == "tool" %}{{- "<|SYSTEM|><results>" + message.content | trim + "</results>" }}
    {%- else %}{{- "<|" + message.role + "|>" + message.content | trim + "<|END|>" }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- "<|CHATBOT|>" }}{% endif %}""",
    # Tells how to call, and writes no calls.
    "smollm-3": """{% if tools %}{{- "<|im_start|>system\\n<tools>" + tools | tojson + "</tools>\\n" }}
    {{- "return a json object with function name and arguments within <tool_call></tool_call> XML tags:" }}
    {{- "<|im_end|>\\n" }}{% endif %}
{%- for message in messages %}{% set content = message.content if message.content is string else "" %}
    {%- if message.role == "assistant" %}{{- "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- else %}{{- "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}{% endif %}
{%- endfor %}"""
    + _OPEN,
    "qwen-2.5": """{% if tools %}<|im_start|>system
# Tools{% for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}"""
    + _OPEN,
    "qwen-3": """{% for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == "assistant" %}{% set reasoning = '' %}
        {%- if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{% endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}"""
    + _OPEN,
    "gemma": """{{ bos_token }}{% for message in messages %}
    {%- if (message['role'] == 'assistant') %}{% set role = "model" %}
    {%- else %}{% set role = message['role'] %}{% endif %}
    {{- '<start_of_turn>' + role + '\n' }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {%- for item in message['content'] %}
            {%- if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}
        {%- endfor %}
    {%- else %}{{ raise_exception("Invalid content type") }}{% endif %}{{ '<end_of_turn>\n' }}
{%- endfor %}""",
    "deepseek": """{{ bos_token }}{% for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['content'] is none %}{{ '<|none|>' }}
        {%- for call in message['tool_calls'] %}{{ call['function']['name'] }}{% endfor %}
    {%- elif message['role'] == 'assistant' and 'tool_calls' in message %}
        {%- if not message['content'] %}{{ '<|calls|>' }}{% else %}{{ message['content'] + '<|calls|>' }}{% endif %}
        {%- for call in message['tool_calls'] %}
            {{- call['type'] + '<|sep|>' + call['function']['name'] + call['function']['arguments'] | tojson }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}
    {%- elif message['role'] == 'tool' %}{{ '<|output|>' + message['content'] }}{% endif %}
{%- endfor %}""",
    "gpt-oss": """{% for message in messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- if message.content and message.thinking %}{{ raise_exception("content and thinking beside a call") }}
        {%- elif message.content %}{{ '<|analysis|>' + message.content }}
        {%- elif message.thinking %}{{ '<|analysis|>' + message.thinking }}{% endif %}
        {%- for call in message.tool_calls %}{{ ' to=' + call.function.name }}{% endfor %}
    {%- elif message.role == 'assistant' %}
        {%- if 'thinking' in message and loop.last %}{{ '<|analysis|>' + message.thinking }}{% endif %}
        {{- '<|final|>' + message.content }}
    {%- else %}{{ '<|' ~ message.role ~ '|>' ~ message.content }}{% endif %}
{%- endfor %}""",
    "nemotron": """{% for m in messages %}<{{ m.role }}{{ ' ' ~ m.name if m.name is defined }}>
{%- set thought = m.reasoning or m.reasoning_content %}{% if thought %}<think>{{ thought }}</think>{% endif %}
{{- m.content if m.content else '' }}{% if m.get('tool_call_id') %}{{ m['tool_call_id'] }}{% endif %}{% endfor %}""",
    # What each turn is, as the template sees it.
    "keys": "{% for m in messages %}{{ m.keys() | list | sort }}{{ m.content }}|{{ m.thinking }}|{{ m.reasoning }}|"
    "{{ m.reasoning_content }}|{{ m.name is defined }}{{ m.tool_calls | default([]) | map(attribute='id') | list }}"
    "{% endfor %}{{ tools is none }}{{ dict(a=1) }}{{ dict.fromkeys([1]) }}",
}
