//! Arithmetics that a request allows, and those that an answer reports.

use super::*;
use crate::exact::Exact;

#[test]
fn the_fingerprint_says_which_arithmetic_made_an_answer() {
    let house = open();
    let weights = house.fixture.service.models()[0].weights.to_string();
    let exact = format!("fp_{}", &weights[..16]);
    let of = |reply: &Reply| -> Vec<String> {
        let chunks = reply.chunks().into_iter();
        let all = chunks.map(|chunk| chunk["system_fingerprint"].as_str().unwrap().to_owned());
        all.collect()
    };
    let stream = of(&house.chat(json!({"stream": true, "user": "a"})));
    assert!(
        stream.len() > 2 && stream.iter().all(|one| *one == exact),
        "{stream:?}"
    );
    house.fixture.census.lock().arithmetic = Some("torch-cpu-bf16".into());
    let other = format!("{exact}-torch-cpu-bf16");
    let stream = of(&house.chat(json!({"stream": true, "user": "b"})));
    assert!(
        stream.len() > 2 && stream.iter().all(|one| *one == other),
        "{stream:?}"
    );
    let whole = house.chat(json!({"user": "c"})).json();
    assert_eq!(whole["system_fingerprint"], other);
}

#[test]
fn a_request_says_which_arithmetics_may_make_it() {
    let house = open_by_key();
    let chat = |extra: Value| house.post_with("/v1/chat/completions", &ask(extra), BEARER);
    let cached = |reply: Reply| {
        let cached = &reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
        cached.as_u64().unwrap() > 0
    };
    assert!(!cached(chat(json!({}))));
    // A conversation cached under another rule is not reused.
    assert!(!cached(chat(json!({"exact": "require"}))));
    assert!(cached(chat(json!({"exact": "require"}))));
    assert!(cached(chat(json!({"exact": "prefer"}))));
    let asked = std::mem::take(&mut house.fixture.census.lock().asked);
    assert_eq!(asked, [Exact::Prefer, Exact::Require]);
    let wrong = chat(json!({"exact": "yes"})).error();
    assert_eq!(wrong, (400, "invalid_value".into(), "exact".into()));
}
