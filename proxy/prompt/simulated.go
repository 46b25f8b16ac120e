package prompt

// simulated is the name of the simulated engine's model.
const simulated = "builtin:sim"

// simulatedTemplate is its chat template. All that a conversation has stands in
// its order, so that a longer one begins with the text of the shorter one.
const simulatedTemplate = `{%- if tools -%}
<|tools|>
{% for tool in tools -%}
{{ tool | tojson }}
{% endfor -%}
{% endif -%}
{% for message in messages -%}
<|{{ message.role }}|>
{% if message.reasoning is string -%}
<think>{{ message.reasoning }}</think>
{% endif -%}
{{ message.content }}
{% for call in message.tool_calls or [] -%}
<|call|>{{ call.function.name }} {{ call.function.arguments | tojson }}
{% endfor -%}
{% endfor -%}
{% if add_generation_prompt -%}
<|assistant|>
{% endif -%}
`
