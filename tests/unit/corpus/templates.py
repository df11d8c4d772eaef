"""Chat templates of other families, as strict as the real ones are, to mask conversations with."""

from __future__ import annotations

# Thinking as Qwen3 writes it: the last answer always has a block, if need be an empty one; earlier ones lose
# theirs; a conversation without a question is refused.
THINKING = r"""
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
  {%- if m.role == "user" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if ns.last < 0 -%}{{- raise_exception("No user query found in messages.") -}}{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == "assistant" -%}
    {{- "<|im_start|>assistant\n" -}}
    {%- if loop.index0 > ns.last -%}
      {{- "<think>\n" + (m.reasoning_content or "") | trim + "\n</think>\n\n" -}}
    {%- endif -%}
    {{- m.content | trim -}}
    {%- for call in m.tool_calls or [] -%}
      {{- "\n<tool_call>\n" + call.function.name + " " + call.function.arguments | tojson -}}
      {{- "\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\n" -}}
  {%- else -%}
    {{- "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|im_start|>assistant\n" -}}
  {%- if enable_thinking is defined -%}
    {{- "<think>\n" if enable_thinking else "<think>\n\n</think>\n\n" -}}
  {%- endif -%}
{%- endif -%}
"""

# Roles must alternate and the first is the user's; no system turn; turns are marked by plain text.
ALTERNATING = r"""
{%- for m in messages -%}
  {%- if (m.role == "user") != (loop.index0 % 2 == 0) -%}
    {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") -}}
  {%- endif -%}
  {%- if m.role == "user" -%}{{- "### Human:\n" + m.content + "\n" -}}
  {%- else -%}{{- "### Assistant:\n" + m.content + "\n" -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "### Assistant:\n" -}}{%- endif -%}
"""

# A tool's answer may only follow a turn that called a tool, so such a turn cannot be replaced by plain text.
STRICT_TOOLS = r"""
{%- for m in messages -%}
  {%- if m.role == "user" -%}{{- "[ASK] " + m.content + " [/ASK]\n" -}}
  {%- elif m.role == "assistant" and m.tool_calls -%}
    {{- "[CALL] " + m.tool_calls[0].function.name + "<|im_end|>\n" -}}
  {%- elif m.role == "assistant" -%}{{- m.content + "<|im_end|>\n" -}}
  {%- elif m.role == "tool" -%}
    {%- if not loop.previtem.tool_calls -%}{{- raise_exception("nobody called a tool") -}}{%- endif -%}
    {{- "[RESULT] " + m.content + " [/RESULT]\n" -}}
  {%- endif -%}
{%- endfor -%}
"""

DEAF = '{%- for m in messages if m.role != "assistant" -%}{{ m.content }}{%- endfor -%}'
ECHOING = "{%- for m in messages -%}{{ m.content }}|{{ m.content }}<|im_end|>{%- endfor -%}"
# No line break behind the header: a token of the answer may begin in the header.
TIGHT = "{%- for m in messages -%}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{%- endfor -%}"
# What is served is not what is trained on.
OTHER_PROMPT = r"""
{%- for m in messages -%}{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>bot\n" }}{%- endif -%}
"""
