//! Vectors of texts in OpenAI's and Ollama's API.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::*;
use crate::exact::Exact;

/// Vectors of `/v1/embeddings`.
fn vectors(house: &House, input: Value) -> Vec<Value> {
    let reply = house.post("/v1/embeddings", &json!({"model": "tiny", "input": input}));
    let value = reply.json();
    assert_eq!((reply.status, &value["object"]), (200, &json!("list")));
    let data = value["data"].as_array().unwrap().iter().zip(0..);
    let vectors = data.map(|(one, index)| {
        assert_eq!(
            (&one["object"], &one["index"]),
            (&json!("embedding"), &json!(index))
        );
        one["embedding"].clone()
    });
    vectors.collect()
}

/// Values of a vector.
fn values(vector: &Value) -> Vec<f32> {
    serde_json::from_value(vector.clone()).unwrap()
}

#[test]
fn every_api_and_encoding_gives_the_same_vector() {
    let house = open();
    let vector = vectors(&house, json!("hello")).remove(0);
    let square: f32 = values(&vector).iter().map(|value| value * value).sum();
    assert!((square - 1.0).abs() < 1e-6, "{square}");
    assert_eq!(values(&vector).len(), 64);

    let body = json!({"model": "tiny", "input": "hello", "encoding_format": "base64",
                      "dimensions": 64, "user": "u", "exact": "require"});
    let reply = house.post("/v1/embeddings", &body).json();
    let bytes = STANDARD.decode(reply["data"][0]["embedding"].as_str().unwrap());
    let bytes = bytes.unwrap();
    let read = bytes.as_chunks::<4>().0.iter();
    let read = read.map(|bytes| f32::from_le_bytes(*bytes));
    assert_eq!(read.collect::<Vec<_>>(), values(&vector));
    let weights = house.fixture.service.models()[0].weights.to_string();
    assert_eq!(reply["model"], "tiny");
    assert_eq!(
        reply["system_fingerprint"],
        format!("fp_{}", &weights[..16])
    );
    assert_eq!(reply["hearthnet_pooling"], "mean-hidden-1");
    let tokens = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens >= 1);
    assert_eq!(reply["usage"]["total_tokens"], tokens);

    let body = json!({"model": "tiny:latest", "input": ["hello", "good day"]});
    let reply = house.post("/api/embed", &body).json();
    let both = vectors(&house, json!(["hello", "good day"]));
    assert_eq!(reply["embeddings"], json!(both));
    assert_eq!(both[0], vector);
    assert_eq!(reply["hearthnet_pooling"], "mean-hidden-1");
    assert!(reply["prompt_eval_count"].as_u64().unwrap() > tokens);
    assert!(reply["total_duration"].as_u64() >= reply["load_duration"].as_u64());
    let body = json!({"model": "tiny", "prompt": "hello"});
    let reply = house.post("/api/embeddings", &body).json();
    assert_eq!(reply["embedding"], vector);
    // Requests that load a model.
    for (path, list) in [
        ("/api/embed", "embeddings"),
        ("/api/embeddings", "embedding"),
    ] {
        let reply = house.post(path, &json!({"model": "tiny"}));
        assert_eq!((reply.status, &reply.json()[list]), (200, &json!([])));
    }
}

#[test]
fn many_texts_have_their_own_vectors_in_order() {
    let house = open();
    let model = &house.fixture.service.models()[0].text;
    // Some groups have one text, and some several.
    let texts: Vec<String> = (0..300)
        .map(|n| format!("{n} ").repeat(1 + n % 61))
        .collect();
    let all = vectors(&house, json!(texts));
    assert_eq!(all.len(), texts.len());
    for at in [0, 1, 60, 61, 199, 298, 299] {
        assert_eq!(vectors(&house, json!(texts[at])), [all[at].clone()], "{at}");
    }
    // The same by token ids.
    let ids = texts[50..60].iter().map(|text| {
        let special = hearthnet_tokens::Special::Plain;
        model.tokenizer.encode_document(text, special).unwrap()
    });
    let ids: Vec<Vec<u32>> = ids.collect();
    assert_eq!(vectors(&house, json!(ids)), all[50..60]);
    assert_eq!(vectors(&house, json!(ids[0])), [all[50].clone()]);
    house.fixture.until_empty();
}

#[test]
fn the_fingerprint_names_the_arithmetics_of_a_vector() {
    let house = open();
    house.fixture.census.lock().arithmetic = Some("torch-cpu-bf16".into());
    let body = json!({"model": "tiny", "input": "hello", "exact": "any"});
    let reply = house.post("/v1/embeddings", &body).json();
    let fingerprint = reply["system_fingerprint"].as_str().unwrap();
    assert!(fingerprint.ends_with("-torch-cpu-bf16"), "{fingerprint}");
    assert_eq!(house.fixture.census.lock().asked, [Exact::Any]);
}

#[test]
fn texts_that_cannot_be_embedded_are_refused_by_name_without_a_backend() {
    let house = open();
    let long = "word ".repeat(200);
    let error = |extra: Value| {
        let body = with(json!({"model": "tiny", "input": "hello"}), extra);
        house.post("/v1/embeddings", &body).error()
    };
    for (extra, status, code, param) in cases::<(Value, u16, String, String)>(json!([
        [{"model": "none"}, 404, "model_not_found", "model"],
        [{"input": []}, 400, "invalid_value", "input"],
        [{"input": vec!["a"; 2049]}, 400, "invalid_value", "input"],
        [{"input": ["a", ""]}, 400, "invalid_value", "input[1]"],
        [{"input": ["a", long]}, 400, "context_length_exceeded", "input[1]"],
        [{"input": long}, 400, "context_length_exceeded", "input"],
        [{"input": [[1], [2, 320]]}, 400, "bad_request", "input[1]"],
        [{"dimensions": 32}, 400, "unsupported_parameter", "dimensions"],
    ])) {
        assert_eq!(error(extra), (status, code, param));
    }
    let ollamas = |path: &str, body: Value| house.post(path, &body);
    let body = json!({"model": "tiny", "input": long, "truncate": false});
    let refused = ollamas("/api/embed", body);
    assert_eq!(refused.status, 400);
    let said = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(
        said.starts_with("This model's maximum context length is 256"),
        "{said}"
    );
    assert_eq!(house.fixture.census.lock().opened, 0);
    let cut = ollamas("/api/embed", json!({"model": "tiny", "input": long})).json();
    assert_eq!(cut["prompt_eval_count"], 256);
    let older = ollamas("/api/embeddings", json!({"model": "tiny", "prompt": long})).json();
    assert_eq!(older["embedding"], cut["embeddings"][0]);
}

#[test]
fn a_backend_that_fails_fails_the_request_and_texts_wait_as_chats_do() {
    let house = house_with(settings(1, 1, 1), |_| {});
    house.fixture.census.lock().fail_after = Some(1);
    let body = json!({"model": "tiny", "input": ["a", "b", "c"]});
    let failed = house.post("/v1/embeddings", &body).error();
    assert_eq!((failed.0, failed.1.as_str()), (503, "shard_unavailable"));
    let running = house.begin_at_the_gate(CLOSE);
    let mut waiting = house.connect();
    let request = post("/v1/embeddings", &body.to_string(), CLOSE);
    waiting.write_all(request.as_bytes()).unwrap();
    house.fixture.until("it waits", |load, _| load.waiting == 1);
    let refused = house.post("/v1/embeddings", &body);
    assert_eq!(refused.error(), (429, "busy".into(), String::new()));
    assert!(refused.headers.contains_key("retry-after"));
    house.fixture.gate.set(false);
    assert_eq!(rest(running).status, 200);
    assert_eq!(rest(waiting).json()["data"].as_array().unwrap().len(), 3);
    // A client that leaves ends the work.
    house.fixture.gate.set(true);
    let mut left = house.connect();
    left.write_all(request.as_bytes()).unwrap();
    house.fixture.until("it runs", |load, _| load.running == 1);
    drop(left);
    house.fixture.until("it ends", |load, _| load.running == 0);
}
