use super::super::super::fields::tests::{STRICT, refusal};
use super::super::common::Answered;
use super::super::common::tests::{end, stream, text_and_call};
use super::*;

fn read_by(rules: Rules, endpoint: Endpoint, body: &Value) -> Result<Asked, ApiError> {
    let stamp = Stamp {
        random: 1,
        created_ms: 0,
    };
    request(body.to_string().as_bytes(), endpoint, stamp, rules)
}

fn read(endpoint: Endpoint, body: Value) -> Result<Asked, ApiError> {
    read_by(Rules::default(), endpoint, &body)
}

fn asked(endpoint: Endpoint, body: Value) -> Translated {
    match read(endpoint, body).unwrap() {
        Asked::Answer(asked) => asked,
        Asked::Load(model, _) => panic!("no prompt for {model}"),
    }
}

fn hi() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

#[test]
fn a_chat_becomes_one_of_openais() {
    let asked = asked(
        Endpoint::Chat,
        json!({
            "model": "m:latest", "messages": hi(), "stream": false, "keep_alive": "5m",
            "format": {"type": "object"}, "think": false,
            "options": {"num_predict": 7, "temperature": 0, "top_k": 4, "seed": 5,
                        "stop": ["x"], "repeat_penalty": 1.1, "num_ctx": 4096, "mirostat": 0},
        }),
    );
    assert_eq!(
        asked.request,
        json!({
            "model": "m", "messages": hi(), "reasoning_effort": "none",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
            "max_tokens": 7, "temperature": 0, "top_k": 4, "seed": 5, "stop": ["x"],
            "repetition_penalty": 1.1,
        })
    );
}

#[test]
fn a_strict_server_refuses_what_others_ignore() {
    let named = json!([{"role": "user", "content": "hi", "name": "n"}]);
    for (body, param) in [
        (json!({"options": {"num_ctx": 4096}}), "options.num_ctx"),
        (json!({"messages": named}), "messages[0].name"),
    ] {
        let asked = with(json!({"model": "m", "messages": hi()}), body);
        let refused = refusal(read_by(STRICT, Endpoint::Chat, &asked));
        assert_eq!(refused.1, param);
        read(Endpoint::Chat, asked).unwrap();
    }
    // Results of tools name their tool, and turns their reasoning.
    let turns = json!([{"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "thinking": "t",
         "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "r", "tool_name": "f"}]);
    let asked = json!({"model": "m", "messages": turns, "options": {"temperature": 0}});
    read_by(STRICT, Endpoint::Chat, &asked).unwrap();
    let embed = |options: Value| {
        let body = json!({"model": "m", "input": "t", "options": options}).to_string();
        embed(body.as_bytes(), VectorFormat::Ollama, STRICT)
    };
    assert!(embed(json!({"num_ctx": 4096})).is_err());
    embed(json!({"temperature": 0})).unwrap();
    assert!(shown(br#"{"model": "m", "verbose": true}"#, STRICT).is_err());
}

#[test]
fn a_prompt_is_a_conversation_unless_it_is_raw() {
    let body = |raw: bool| json!({"model": "m", "prompt": "hi", "raw": raw, "format": "json"});
    let chat = asked(Endpoint::Generate, body(false));
    assert_eq!(chat.request["messages"], hi());
    assert_eq!(chat.request["stream"], true);
    let format = json!({"type": "json_object"});
    assert_eq!(chat.request["response_format"], format);
    let raw = asked(Endpoint::Generate, body(true));
    assert_eq!(raw.shape, Shape::Text);
    assert_eq!(raw.request["prompt"], "hi");
    assert_eq!(raw.request["max_tokens"], u32::MAX);
}

#[test]
fn without_a_prompt_a_model_is_loaded() {
    let body = json!({"model": "m", "keep_alive": 0});
    for (endpoint, member) in [
        (Endpoint::Chat, "message"),
        (Endpoint::Generate, "response"),
    ] {
        let Asked::Load(model, value) = read(endpoint, body.clone()).unwrap() else {
            panic!("an answer")
        };
        assert_eq!(
            (model.as_str(), &value["done_reason"]),
            ("m", &json!("unload"))
        );
        assert!(value.get(member).is_some());
    }
}

#[test]
fn results_of_tools_have_the_ids_of_their_calls() {
    let function = json!({"name": "weather", "arguments": {"city": "Rome"}});
    let asked = asked(
        Endpoint::Chat,
        json!({"model": "m", "messages": [
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "sun", "tool_name": "weather"},
        ]}),
    );
    let messages = &asked.request["messages"];
    assert_eq!(
        messages[1]["tool_calls"][0]["id"],
        messages[2]["tool_call_id"]
    );
    let function = json!({"name": "weather", "arguments": "{\"city\":\"Rome\"}"});
    assert_eq!(messages[1]["tool_calls"][0]["function"], function);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (endpoint, extra, param) in [
        (
            Endpoint::Chat,
            json!({"options": {"mirostat": 2}}),
            "options.mirostat",
        ),
        (
            Endpoint::Chat,
            json!({"options": {"heat": 2}}),
            "options.heat",
        ),
        (Endpoint::Chat, json!({"format": "xml"}), "format"),
        (Endpoint::Chat, json!({"think": 5}), "think"),
        (Endpoint::Chat, json!({"prompt": "p"}), "prompt"),
        (Endpoint::Generate, json!({"suffix": "s"}), "suffix"),
        (Endpoint::Generate, json!({"context": [1]}), "context"),
        (Endpoint::Generate, json!({"images": ["x"]}), "images"),
    ] {
        let body = with(json!({"model": "m"}), extra);
        assert_eq!(refusal(read(endpoint, body)).1, param);
    }
}

#[test]
fn texts_to_embed_are_read_and_none_loads_a_model() {
    let read = |format: VectorFormat, mut body: Value| {
        body["model"] = json!("m:latest");
        embed(body.to_string().as_bytes(), format, Rules::default())
    };
    let new = |body: Value| read(VectorFormat::Ollama, body);
    let asked = new(
        json!({"input": ["a", "b"], "truncate": false, "dimensions": 0,
                           "options": {"num_ctx": 8}, "keep_alive": 5}),
    );
    let asked = asked.unwrap();
    assert_eq!((asked.model.as_str(), asked.inputs.len()), ("m", 2));
    assert_eq!((asked.truncate, asked.dimensions), (false, None));
    let asked = read(VectorFormat::OlderOllama, json!({"prompt": "a"})).unwrap();
    assert!(asked.truncate && asked.inputs.len() == 1);
    for nothing in [json!({}), json!({"input": ""}), json!({"input": []})] {
        assert!(new(nothing).unwrap().inputs.is_empty());
    }
    for (body, param) in [
        (json!({"input": ["a", ""]}), "input[1]"),
        (json!({"input": [1]}), "input"),
        (json!({"input": {}}), "input"),
        (json!({"input": vec!["a"; 2049]}), "input"),
        (json!({"input": "a", "dimensions": -1}), "dimensions"),
        (json!({"input": "a", "truncate": 1}), "truncate"),
        (json!({"input": "a", "prompt": "a"}), "prompt"),
    ] {
        assert_eq!(refusal(new(body)).1, param);
    }
    let older = read(VectorFormat::OlderOllama, json!({"prompt": ["a"]}));
    assert_eq!(refusal(older).1, "prompt");
}

#[test]
fn a_stream_is_objects_of_which_the_last_has_times() {
    let mut translation = asked(Endpoint::Chat, json!({"model": "m", "messages": hi()}));
    let events = stream(&mut *translation.translation, &text_and_call(), "stop");
    let texts: Vec<&str> = events
        .iter()
        .filter_map(|(_, object)| object["message"]["content"].as_str())
        .collect();
    assert_eq!(texts, ["Let me", " look.", "", ""]);
    let call = &events[2].1["message"]["tool_calls"][0]["function"];
    assert_eq!(call["arguments"], json!({"city": "Rome"}));
    let (_, last) = &events[3];
    assert_eq!(
        (&last["done"], &last["done_reason"]),
        (&json!(true), &json!("stop"))
    );
    assert_eq!(last["total_duration"], 1_500_000_000);
    assert_eq!(
        (&last["prompt_eval_count"], &last["eval_count"]),
        (&json!(20), &json!(7))
    );
    assert_eq!(last["created_at"], "1970-01-01T00:00:00.000Z");
}

#[test]
fn an_answer_in_one_piece_has_all_of_it() {
    let mut answered = Answered::default();
    for piece in text_and_call() {
        answered.add(&piece);
    }
    let mut chat = asked(Endpoint::Chat, json!({"model": "m", "messages": hi()}));
    let whole = chat.translation.whole(&end(answered.clone(), "length"));
    assert_eq!(whole["message"]["content"], "Let me look.");
    assert_eq!(whole["done_reason"], "length");
    let mut text = asked(Endpoint::Generate, json!({"model": "m", "prompt": "hi"}));
    let whole = text.translation.whole(&end(answered, "stop"));
    assert_eq!(whole["response"], "Let me look.");
}
