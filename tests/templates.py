"""Chat templates in the shapes that public models use, written anew for the tests. Knows nothing of lever."""

from __future__ import annotations

TEMPLATES = {
    # Qwen2.5: system prompt of its own, tools as JSON lines, tool answers gathered in one user turn
    "chatml-tools": """
{%- set own = 'You are a helpful assistant.' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0]['content'] if messages[0]['role'] == 'system' else own }}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\n' + own + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    # SmolLM2: everything on one line
    "chatml-inline": (
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are small<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # Llama 3: a header for each turn, BOS in front of the first, content trimmed
    "llama-3": """
{%- for message in messages %}
    {%- set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {%- set text = text + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}{%- set text = bos_token + text %}{%- endif %}
    {{- text }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    # Llama 3.1: dates, tools in the first user turn, indented JSON
    "llama-3-tools": """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now('%d %b %Y') %}
    {%- else %}
        {%- set date_string = '26 Jul 2024' %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' + system_message }}
{{- '<|eot_id|>' }}
{%- if tools is not none and messages | length != 0 %}
    {%- set first = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception('One call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- call.name + '(' }}
        {%- for key, value in call.arguments.items() %}
            {{- key + '="' ~ value ~ '"' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ')<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    # Mistral: turns alternate strictly, no system role
    "inst-strict": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles have to alternate: user, assistant, user ...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
        "{% else %}{{ raise_exception('Only user and assistant!') }}{% endif %}{% endfor %}"
    ),
    # Llama 2: the system text inside the first user turn, BOS in front of each
    "inst-sys": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
        "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}"
        "{% set system = false %}{% endif %}{% for message in rest %}"
        "{% if loop.index0 == 0 and system != false %}"
        "{% set text = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
        "{% else %}{% set text = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    # Gemma: the assistant is called model, the system role is refused
    "turns-no-system": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    # Phi 3: the role itself becomes a control token
    "role-is-token": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    # Zephyr: block tags on their own lines, so that trimming of blocks matters
    "own-lines": """{% for message in messages %}
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
{% endfor %}
""",
    # DeepSeek R1: what was thought before is cut off, state in a namespace
    "think-cut": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(is_first=false, is_tool=false, system='') %}"
        "{%- for message in messages %}{%- if message['role'] == 'system' %}"
        "{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system}}"
        "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
        "{{'<\uff5cUser\uff5c>' + message['content']}}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
        "{% set content = message['content'] %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{'<\uff5cAssistant\uff5c>' + content + '<\uff5cend\u2581of\u2581sentence\uff5c>'}}{%- endif %}"
        "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}"
        "{{'<tool_output>' + message['content'] + '</tool_output>'}}{%- endif %}{%- endfor -%}"
        "{% if add_generation_prompt and not ns.is_tool %}{{'<\uff5cAssistant\uff5c><think>\\n'}}{% endif %}"
    ),
    # Qwen3: walks backwards for the last question, keeps only newer thoughts
    "think-walk": """
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thought)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    # Command R, Granite: documents, filters over lists
    "documents": """{{ bos_token }}
{%- if documents %}
<|start_of_role|>documents<|end_of_role|>
{%- for document in documents | sort(attribute='title') %}
Document {{ loop.index }}/{{ loop.length }}: {{ document['title'] | title }}
{{ document.text | default('(none)', true) | indent(2, true) | replace('  -', '  *') }}
{%- endfor %}
{{ documents | map(attribute='title') | map('upper') | join(', ') }}
{{ documents | selectattr('text') | list | length }} of {{ documents | length }}<|end_of_text|>
{%- endif %}
{%- for message in messages %}
{{ '<|start_of_role|>' ~ message.role ~ '<|end_of_role|>' ~ message.content ~ '<|end_of_text|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
<|start_of_role|>assistant<|end_of_role|>
{%- endif %}
""",
    # Gemma 4, gpt-oss: macros that call themselves over a schema
    "macros": """
{%- macro kind(spec) -%}
    {%- if spec.type is string -%}{{ spec.type | upper }}
    {%- else -%}{{ spec.type | map('upper') | join('|') }}{%- endif -%}
{%- endmacro -%}
{%- macro schema(properties, depth=0) -%}
    {%- for key, spec in properties | dictsort -%}
        {{ '  ' * depth ~ key }}: {{ kind(spec) }}{{ ' // ' ~ spec.description if spec.description }}
        {%- if spec.properties %}{{ '\\n' ~ schema(spec.properties, depth + 1) }}{% endif -%}
        {{ ',\\n' if not loop.last }}
    {%- endfor -%}
{%- endmacro -%}
{{- bos_token }}
{%- for tool in tools or [] %}
{{- '<|turn>tool ' ~ tool.function.name ~ '\\n' ~ schema(tool.function.parameters.properties) ~ '<turn|>\\n' }}
{%- endfor %}
{%- for message in messages -%}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- filter trim %}{{ message.content }}{% endfilter %}
    {{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{%- endif %}
""",
    # SmolLM3, training forks: what the assistant says stands in a generation block
    "generation": """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- set said = message.content | trim %}
        {{- said + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    # GLM 4, Hermes: options of tojson, loop controls, items, set blocks
    "json-options": """[gMASK]<sop>
{%- for tool in tools or [] %}
    {%- if tool.function is not defined %}{%- continue %}{%- endif %}
    {%- set text %}{{ tool | tojson(ensure_ascii=False, separators=(',', ':'), sort_keys=True) }}{% endset %}
    {{- '\\n' + text | safe }}
    {{- '\\n' + tool.function.description | tojson(ensure_ascii=true) }}
    {%- for name, spec in tool.function.parameters.properties | items %}
        {{- '\\n- ' + name + ' ' + spec | tojson(indent=1) | replace('\\n', ' ') }}
        {%- if loop.index == 2 %}{%- break %}{%- endif %}
    {%- endfor %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|' ~ message.role ~ '|>\\n' ~ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
""",
    # Vicuna, Alpaca: plain words, leading line break, the system text trimmed
    "plain-words": """{% if messages[0]['role'] == 'system' %}
    {% set system_message = messages[0]['content'] | trim + '\\n' %}
    {% set messages = messages[1:] %}
{% else %}
    {% set system_message = '' %}
{% endif %}
{{ bos_token + system_message }}
{% for message in messages %}
    {% if message['role'] == 'user' %}
        {{ 'USER: ' + message['content'] | trim }}
    {% elif message['role'] == 'assistant' %}
        {{ 'ASSISTANT: ' + message['content'] | trim + eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ 'ASSISTANT:' }}
{% endif %}""",
    # Phi 4 reasoning and others: state kept in loops, slices, in-lists, cycles
    "odds-and-ends": """{{ bos_token }}
{%- set seen = namespace(roles=[], longest=0) %}
{%- for message in messages[-6:] %}
    {%- if message.role not in seen.roles %}{%- set seen.roles = seen.roles + [message.role] %}{%- endif %}
    {%- set seen.longest = [seen.longest, message.content | length] | max %}
    {{- loop.cycle('<|im_start|>', '<|im_start|>') ~ message.role ~ '<|im_sep|>' }}
    {{- message.content[:200] ~ ('...' if message.content | length > 200 else '') ~ '<|im_end|>' }}
    {{- '\\n' if loop.nextitem is defined and loop.nextitem.role != message.role }}
{%- endfor %}
{{- '[' ~ seen.roles | join('/') ~ ' ' ~ (seen.longest / 2) | round | int ~ ' ' ~ 7 // 2 ~ 2 ** 3 ~ ']' }}
{%- set pair = ('x', {'a': 1, 'b': [true, none]}) %}{{ pair[1].b | first }}{{ dict(a=1).get('z', '-') }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
}
