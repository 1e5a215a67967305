"""Chat templates in the manner of several families of models, and the tokens that they need."""

# Name, whether it is a control token.
CHATML = [("<|im_start|>", True), ("<|im_end|>", True)]
THINK = [("<think>", False), ("</think>", False)]
HERMES_TOKENS = [*CHATML, ("<tool_call>", False), ("</tool_call>", False), *THINK]

_CALLS = """
{%- for call in m.tool_calls %}{{ "\\n" }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor -%}
"""

# As Qwen's and Hermes' are: tools in the system's message, and thoughts of the last turn only.
HERMES = (
    """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call></tool_call>.<|im_end|>
{% endif -%}
{%- for m in messages %}
{%- if m.role == "tool" %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}
"""
    + _CALLS
    + """<|im_end|>
{% endif -%}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
)

# As DeepSeek's distilled models have it: the prompt ends within thoughts.
THINKS = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

LLAMA_TOKENS = [
    *(("<|start_header_id|>", True), ("<|end_header_id|>", True), ("<|eot_id|>", True)),
    *(("<|eom_id|>", True), ("<|python_tag|>", True)),
]

LLAMA = """{{ bos_token }}
{%- for m in messages %}
{%- if m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>

{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "parameters": {{
call.function.arguments | tojson }}}{% endfor %}<|eot_id|>
{%- else %}<|start_header_id|>{{ "ipython" if m.role == "tool" else m.role }}<|end_header_id|>

{% if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL_TOKENS = [
    *(("[INST]", True), ("[/INST]", True), ("[TOOL_CALLS]", True), ("[ARGS]", True)),
    *(("[AVAILABLE_TOOLS]", True), ("[/AVAILABLE_TOOLS]", True), ("[TOOL_RESULTS]", True)),
    ("[/TOOL_RESULTS]", True),
]

MISTRAL = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == "user" %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids of calls have 9 characters") }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }},
{#- #} "id": "{{ call.id }}"}{{ ", " if not loop.last }}
{%- endfor %}]{{ eos_token }}
{%- elif m.role == "tool" %}[TOOL_RESULTS]{"content": {{ m.content | tojson }},
{#- #} "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""

HARMONY_TOKENS = [
    *(("<|start|>", True), ("<|end|>", True), ("<|message|>", True), ("<|channel|>", True)),
    *(("<|constrain|>", True), ("<|return|>", True), ("<|call|>", True)),
]

# As gpt-oss's is: thoughts are kept in front of calls only, and a call has them or a content.
HARMONY = """<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}
{%- for tool in tools or [] %}
{{ tool | tojson }}{% endfor %}<|end|>
{%- for m in messages %}
{%- if m.tool_calls %}{% set call = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{ raise_exception("thoughts and a content") }}{% endif %}
{%- if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{#- #}{{ m.content or m.thinking }}<|end|>{% endif %}<|start|>assistant to=functions.{{ call.name }}
{#- #}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- elif m.role == "tool" %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>
{#- #}{{ m.content }}<|end|>
{%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>
{#- #}{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

UNKNOWN = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}"

# The template of each kind, and its tokens.
KINDS = {
    "hermes": (HERMES, HERMES_TOKENS),
    "llama": (LLAMA, LLAMA_TOKENS),
    "mistral": (MISTRAL, MISTRAL_TOKENS),
    "mistral-11": (f"{MISTRAL}{{# [ARGS] #}}", MISTRAL_TOKENS),
    "harmony": (HARMONY, HARMONY_TOKENS),
    "thinks": (THINKS, [*CHATML, *THINK]),
    "thinks-calls": (f"{{# <tool_call> #}}{{% if tools %}}{{% endif %}}{THINKS}", HERMES_TOKENS),
    "unknown": (UNKNOWN, ()),
    "none": ("{{ messages[0].content }}", ()),
}
