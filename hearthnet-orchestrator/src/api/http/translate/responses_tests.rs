use super::super::super::fields::tests::{STRICT, refusal};
use super::super::super::request::chat;
use super::super::common::Answered;
use super::super::common::tests::{end, stream, text_and_call};
use super::*;
use crate::api::fields::tests::cases;

fn read(body: Value) -> Result<Translated, ApiError> {
    read_by(Rules::default(), &body)
}

fn read_by(rules: Rules, body: &Value) -> Result<Translated, ApiError> {
    let stamp = Stamp {
        random: 1,
        created_ms: 5000,
    };
    let earlier = |user: &str, id: &str| {
        let messages = vec![
            json!({"role": "user", "content": "one"}),
            json!({"role": "assistant", "content": "two"}),
        ];
        (user == "u" && id == "resp_known").then_some(messages)
    };
    request(body.to_string().as_bytes(), stamp, rules, &earlier)
}

/// The request with which Codex 0.171.0 begins, without its texts and most of its tools.
fn codex() -> Value {
    serde_json::from_str(include_str!("../tests/codex_request.json")).unwrap()
}

fn translation() -> Box<dyn Translation> {
    read(json!({"model": "m", "input": "hi"}))
        .unwrap()
        .translation
}

#[test]
fn a_request_becomes_a_chat_completion() {
    let asked = read(json!({
        "model": "m", "instructions": "Be short.", "max_output_tokens": 9, "temperature": 0,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "three"}]}],
        "previous_response_id": "resp_known", "user": "u", "metadata": {"a": "b"},
        "text": {"format": {"type": "json_schema", "name": "n", "strict": true,
                            "schema": {"type": "object"}}},
        "store": true, "stream": true, "truncation": "disabled", "include": [],
    }));
    let mut asked = asked.unwrap();
    let schema = json!({"name": "n", "strict": true, "schema": {"type": "object"}});
    assert_eq!(
        asked.request,
        json!({
            "model": "m", "max_completion_tokens": 9, "temperature": 0, "user": "u",
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": "three"},
            ],
            "response_format": {"type": "json_schema", "json_schema": schema},
            "stream": true, "stream_options": {"include_usage": true},
            "truncation": "disabled",
        })
    );
    // Instructions do not carry over to the next response.
    let mut answered = Answered::default();
    answered.add(&Piece::Text("four".into()));
    let conversation = asked
        .translation
        .conversation(&end(answered, "stop"))
        .unwrap();
    let texts: Vec<&str> = conversation
        .iter()
        .filter_map(|message| message["content"].as_str())
        .collect();
    assert_eq!(texts, ["one", "two", "three", "four"]);
}

#[test]
fn a_response_that_is_not_to_be_stored_is_not() {
    let body = json!({"model": "m", "input": "hi", "store": false});
    let mut asked = read(body).unwrap();
    let ended = end(Answered::default(), "stop");
    assert!(asked.translation.conversation(&ended).is_none());
}

#[test]
fn calls_of_functions_and_results_become_messages() {
    let asked = read(json!({
        "model": "m",
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"},
                   "strict": true}],
        "tool_choice": {"type": "function", "name": "weather"},
        "input": [
            {"role": "user", "content": "Rome?"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather",
             "arguments": "{\"city\":\"Rome\"}", "status": "completed"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        ],
    }));
    let request = asked.unwrap().request;
    let named = json!({"type": "function", "function": {"name": "weather"}});
    assert_eq!(request["tool_choice"], named);
    assert_eq!(request["tools"][0]["function"]["strict"], true);
    let function = json!({"name": "weather", "arguments": "{\"city\":\"Rome\"}"});
    assert_eq!(
        request["messages"],
        json!([
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": "Let me look.",
             "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        ])
    );
}

#[test]
fn codex_begins_and_goes_on_behind_a_call_of_a_function_in_a_namespace() {
    let begun = read(codex()).unwrap();
    let names = |request: &Value| -> Vec<String> {
        let tools = request["tools"].as_array().unwrap().iter();
        let names = tools.map(|tool| tool["function"]["name"].as_str().unwrap().to_owned());
        names.collect()
    };
    assert_eq!(
        names(&begun.request),
        [
            "exec_command",
            "multi_agent_v1__close_agent",
            "multi_agent_v1__send_input",
            "mcp__town__get_weather",
            "update_goal",
        ]
    );
    // Most chat templates want one message of each role.
    let messages = json!([
        {"role": "system", "content": "t\ntt"}, {"role": "user", "content": "t\nt"},
    ]);
    assert_eq!(begun.request["messages"], messages);
    let body = begun.request.to_string();
    chat(body.as_bytes(), Rules::default()).unwrap();

    let call = [
        Piece::Call {
            id: "c1".into(),
            name: "mcp__town__get_weather".into(),
        },
        Piece::Arguments("{\"town\": \"Oslo\"}".into()),
    ];
    let mut translation = begun.translation;
    let events = stream(&mut *translation, &call, "tool_calls");
    let (name, event) = &events[events.len() - 2];
    assert_eq!(*name, Some("response.output_item.done"));
    let called = event["item"].clone();
    assert_eq!(called["name"], "get_weather");
    assert_eq!(called["namespace"], "mcp__town");
    // Clients read from here that a turn is over, and what it cost.
    let (name, event) = &events[events.len() - 1];
    assert_eq!(*name, Some("response.completed"));
    assert!(event["response"]["id"].is_string());
    assert_eq!(event["response"]["usage"]["total_tokens"], 27);

    let mut next = codex();
    let items = next["input"].as_array_mut().unwrap();
    items.push(
        json!({"type": "reasoning", "id": "rs_1", "summary": [], "content": [],
                      "encrypted_content": null}),
    );
    items.push(
        json!({"type": "web_search_call", "id": "ws_1", "status": "completed",
                      "action": {"type": "search", "query": "t"}}),
    );
    items.push(called);
    let output = json!([{"type": "input_text", "text": "20 "},
                        {"type": "input_text", "text": "degrees"}]);
    items.push(
        json!({"type": "function_call_output", "id": "fco_1", "call_id": "c1",
                      "output": output}),
    );
    items.push(
        json!({"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch",
                      "input": "t", "status": "completed"}),
    );
    items.push(json!({"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}));
    items.push(json!({"type": "additional_tools", "role": "developer",
                      "tools": [{"type": "function", "name": "more"}]}));
    let next = read(next).unwrap().request;
    assert_eq!(names(&next).last().unwrap(), "more");
    let messages = next["messages"].as_array().unwrap();
    let function = &messages[2]["tool_calls"][0]["function"];
    let named = json!({"name": "mcp__town__get_weather", "arguments": "{\"town\": \"Oslo\"}"});
    assert_eq!(*function, named);
    let result = json!({"role": "tool", "tool_call_id": "c1", "content": "20 degrees"});
    assert_eq!(messages[3], result);
    let patch = &messages[4]["tool_calls"][0]["function"];
    assert_eq!(patch["arguments"], "{\"input\":\"t\"}");
    assert_eq!(messages[5]["content"], "done");
    chat(next.to_string().as_bytes(), Rules::default()).unwrap();
}

#[test]
fn a_strict_server_refuses_what_others_ignore() {
    for (extra, param) in cases::<(Value, String)>(json!([
        [{"include": []}, "include"],
        [{"reasoning": {"summary": "auto"}}, "reasoning.summary"],
        [{"text": {"verbosity": "low"}}, "text.verbosity"],
        [{"tools": [{"type": "web_search"}]}, "tools[0].type"],
    ])) {
        let body = with(json!({"model": "m", "input": "hi"}), extra);
        let refused = refusal(read_by(STRICT, &body));
        assert_eq!(refused, ("unsupported_parameter".into(), param));
        read(body).unwrap();
    }
    // The items of an answer come back.
    let answered = json!([
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [], "status": "completed"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "t", "annotations": [], "logprobs": []}]},
        {"role": "user", "content": "hi"},
    ]);
    read_by(STRICT, &json!({"model": "m", "input": answered})).unwrap();
}

#[test]
fn system_messages_stand_at_the_beginning() {
    let asked = read(json!({
        "model": "m", "instructions": "a",
        "input": [
            {"role": "developer", "content": "b"}, {"role": "system", "content": "c"},
            {"role": "user", "content": "d"}, {"role": "developer", "content": "e"},
            {"role": "assistant", "content": "f"}, {"role": "developer", "content": "g"},
        ],
    }));
    assert_eq!(
        asked.unwrap().request["messages"],
        json!([
            {"role": "system", "content": "a\nb\nc"}, {"role": "user", "content": "d\ne"},
            {"role": "assistant", "content": "f"}, {"role": "user", "content": "g"},
        ])
    );
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (extra, param) in cases::<(Value, String)>(json!([
        [{"input": null}, "input"],
        [{"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"],
        [{"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"],
        [{"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"],
        [{"background": true}, "background"],
        [{"conversation": "c"}, "conversation"],
        [{"previous_response_id": "resp_other"}, "previous_response_id"],
        [{"temprature": 1}, "temprature"],
    ])) {
        let body = with(json!({"model": "m", "input": "hi"}), extra);
        assert_eq!(refusal(read(body)).1, param);
    }
}

#[test]
fn a_stream_has_items_that_begin_and_end() {
    let events = stream(&mut *translation(), &text_and_call(), "tool_calls");
    let names: Vec<&str> = events
        .iter()
        .filter_map(|(name, _)| name.and_then(|name| name.strip_prefix("response.")))
        .collect();
    assert_eq!(
        names.join(" "),
        "created in_progress \
         output_item.added content_part.added output_text.delta output_text.delta \
         output_text.done content_part.done output_item.done \
         output_item.added function_call_arguments.delta function_call_arguments.delta \
         function_call_arguments.done output_item.done completed"
    );
    for (index, (name, event)) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], index);
        assert_eq!(event["type"].as_str(), *name);
    }
    let response = &events[14].1["response"];
    let mut answered = Answered::default();
    for piece in text_and_call() {
        answered.add(&piece);
    }
    // The same object as without a stream.
    assert_eq!(*response, translation().whole(&end(answered, "tool_calls")));
    let text = &response["output"][0]["content"][0]["text"];
    assert_eq!(text, "Let me look.");
    assert_eq!(response["output"][1]["arguments"], "{\"city\":\"Rome\"}");
    assert_eq!(
        response["usage"]["input_tokens_details"]["cached_tokens"],
        5
    );
    assert_eq!(response["created_at"], 5);
}

#[test]
fn an_answer_that_is_cut_is_incomplete() {
    let whole = translation().whole(&end(Answered::default(), "length"));
    assert_eq!(whole["status"], "incomplete");
    let reason = json!({"reason": "max_output_tokens"});
    assert_eq!(whole["incomplete_details"], reason);
}
