use super::super::super::fields::tests::{STRICT, refusal};
use super::super::common::Answered;
use super::super::common::tests::{end, stream, text_and_call};
use super::*;
use crate::api::fields::tests::cases;
use crate::api::fields::with;

fn read_by(rules: Rules, body: &Value) -> Result<Translated, ApiError> {
    let stamp = Stamp {
        random: 1,
        created_ms: 0,
    };
    request(body.to_string().as_bytes(), Purpose::Answer, stamp, rules)
}

fn read(body: Value) -> Result<Translated, ApiError> {
    read_by(Rules::default(), &body)
}

fn base(extra: Value) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    with(
        json!({"model": "m", "max_tokens": 9, "messages": messages}),
        extra,
    )
}

fn translation() -> Box<dyn Translation> {
    read(base(json!({}))).unwrap().translation
}

#[test]
fn a_request_becomes_one_of_openais() {
    let asked = read(base(json!({
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                   {"type": "text", "text": "b"}],
        "temperature": 0.5, "top_k": 3, "stop_sequences": ["x"], "stream": true,
        "metadata": {"user_id": "u"}, "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    })));
    let asked = asked.unwrap();
    assert_eq!(asked.stops, ["x"]);
    assert_eq!(
        asked.request,
        json!({
            "model": "m", "max_tokens": 9, "temperature": 0.5, "top_k": 3, "stop": ["x"],
            "messages": [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
            "thinking_budget": 1024,
            "user": "u", "stream": true, "stream_options": {"include_usage": true},
        })
    );
}

#[test]
fn tools_and_their_results_become_openais() {
    let asked = read(base(json!({
        "tools": [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": true},
        "messages": [
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1",
                 "content": [{"type": "text", "text": "sun"}], "is_error": false},
                {"type": "text", "text": "Well?"},
            ]},
        ],
    })));
    let request = asked.unwrap().request;
    let named = json!({"type": "function", "function": {"name": "weather"}});
    assert_eq!(request["tool_choice"], named);
    assert_eq!(request["parallel_tool_calls"], false);
    let function = json!({"name": "weather", "description": "d", "parameters": {"type": "object"}});
    assert_eq!(
        request["tools"],
        json!([{"type": "function", "function": function}])
    );
    let function = json!({"name": "weather", "arguments": "{\"city\":\"Rome\"}"});
    assert_eq!(
        request["messages"],
        json!([
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": "Let me look.",
             "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
            {"role": "user", "content": "Well?"},
        ])
    );
}

#[test]
fn system_messages_continue_the_users_turn_and_offer_tools() {
    let tool = |name: &str, deferred: bool| json!({"name": name, "defer_loading": deferred});
    let named = |name: &str| json!({"type": "tool_reference", "name": name});
    let asked = read(base(json!({
        "tools": [tool("a", false), tool("b", true), tool("c", true), tool("d", true)],
        "messages": [
            {"role": "user", "content": "Rome?"},
            {"role": "system", "content": [{"type": "text", "text": "Today is Monday."}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "call_1", "name": "search", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1",
                 "content": [{"type": "tool_reference", "tool_name": "b"}]}]},
            {"role": "system", "content": [
                {"type": "tool_addition", "tool": named("c")},
                {"type": "tool_removal", "tool": named("a")}]},
            {"role": "user", "content": "Well?"},
            {"role": "user", "content": "Answer."},
        ],
    })));
    let request = asked.unwrap().request;
    let messages = &request["messages"];
    assert_eq!(messages[0]["content"], "Rome?\nToday is Monday.");
    assert_eq!(messages[2]["content"], "The tool b can be called now.");
    assert_eq!(
        messages[3],
        json!({"role": "user", "content": "Well?\nAnswer."})
    );
    assert_eq!(messages.as_array().map(Vec::len), Some(4));
    let tools = request["tools"].as_array().unwrap();
    let names: Vec<&Value> = tools.iter().map(|tool| &tool["function"]["name"]).collect();
    assert_eq!(names, ["b", "c"]);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let image = json!([{"type": "image", "source": {}}]);
    for (extra, param) in cases::<(Value, String)>(json!([
        [{"max_tokens": null}, "max_tokens"],
        [{"messages": []}, "messages"],
        [{"messages": [{"role": "assistant", "content": "Once"}]}, "messages"],
        [{"messages": [{"role": "user", "content": image}]}, "messages[0].content[0].type"],
        [{"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"],
        [{"system": 5}, "system"],
        [{"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"],
        [{"tool_choice": {"type": "some"}}, "tool_choice.type"],
        [{"thinking": {"type": "deep"}}, "thinking.type"],
        [{"temprature": 1}, "temprature"],
        [{"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}, "mcp_servers"],
    ])) {
        assert_eq!(refusal(read(base(extra))).1, param);
    }
    let thread = base(json!({"thread": {"type": "create"}}));
    let (code, param) = refusal(read(thread));
    assert_eq!(code, "thread_unsupported_request");
    assert_eq!(param, "thread");
}

#[test]
fn a_strict_server_refuses_what_others_ignore() {
    let cached = json!({"type": "ephemeral"});
    let block = json!({"type": "text", "text": "hi", "cache_control": cached});
    let tool = json!({"name": "f", "cache_control": cached});
    for (extra, param) in cases::<(Value, String)>(json!([
        [{"service_tier": "auto"}, "service_tier"],
        [{"cache_control": cached}, "cache_control"],
        [{"system": [block]}, "system[0].cache_control"],
        [{"messages": [{"role": "user", "content": [block]}]},
         "messages[0].content[0].cache_control"],
        [{"tools": [tool]}, "tools[0].cache_control"],
        [{"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"],
    ])) {
        let body = base(extra);
        let refused = refusal(read_by(STRICT, &body));
        assert_eq!(refused, ("unsupported_parameter".into(), param));
        read(body).unwrap();
    }
    read_by(STRICT, &base(json!({"mcp_servers": []}))).unwrap();
}

#[test]
fn a_stream_has_blocks_that_begin_and_end() {
    let events = stream(&mut *translation(), &text_and_call(), "tool_calls");
    let names: Vec<&str> = events.iter().filter_map(|(name, _)| *name).collect();
    assert_eq!(
        names.join(" "),
        "message_start ping \
         content_block_start content_block_delta content_block_delta content_block_stop \
         content_block_start content_block_delta content_block_delta content_block_stop \
         message_delta message_stop"
    );
    for (name, event) in &events {
        assert_eq!(event["type"].as_str(), *name);
    }
    assert_eq!(events[6].1["index"], 1);
    assert_eq!(events[6].1["content_block"]["name"], "weather");
    let partial = json!({"type": "input_json_delta", "partial_json": "{\"city\":"});
    assert_eq!(events[7].1["delta"], partial);
    let (_, last) = &events[10];
    assert_eq!(last["delta"]["stop_reason"], "tool_use");
    assert_eq!(last["usage"]["input_tokens"], 15);
    assert_eq!(last["usage"]["cache_read_input_tokens"], 5);
    assert_eq!(last["usage"]["output_tokens"], 7);
}

#[test]
fn an_answer_in_one_piece_has_the_same_blocks() {
    let mut answered = Answered::default();
    answered.add(&Piece::Reasoning("Hm.".into()));
    for piece in text_and_call() {
        answered.add(&piece);
    }
    let whole = translation().whole(&end(answered, "tool_calls"));
    assert_eq!(
        whole["content"],
        json!([
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
        ])
    );
    assert_eq!(whole["stop_reason"], "tool_use");
    for (reason, stop, is) in [
        ("stop", None, "end_turn"),
        ("stop", Some("x"), "stop_sequence"),
        ("length", None, "max_tokens"),
    ] {
        let mut end = end(Answered::default(), reason);
        end.stop = stop.map(str::to_owned);
        let whole = translation().whole(&end);
        assert_eq!(whole["stop_reason"], is);
        assert_eq!(whole["stop_sequence"], json!(stop));
        assert_eq!(whole["content"], json!([]));
    }
}
