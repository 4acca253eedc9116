//! Model names and request texts come back in HTTP responses. The interface serves no page, but a
//! browser can be led to it and would run anything that it takes for one. No response therefore has
//! a type that can run, all forbid type sniffing, and all forbid scripts and subresources.

use serde_json::{Value, json};

use super::prelude::*;
use crate::household::{interface, send, service_of, whole_answer};

/// Runs if it is taken for HTML; also ends an attribute, a script and a metrics line.
const WORDS: &str = "\"'><script>alert('evil')</script><img src=x onerror=evil()>\n\u{202e}";
/// Content types of which browsers run nothing.
const SAFE: [&str; 2] = ["application/json", "text/event-stream"];

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let server = interface(service_of(WORDS)?).await?;
    let ask = |model: &str, more: Value| {
        let mut body = json!({ "model": model, "prompt": "hello", "max_tokens": 2 });
        if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
            body.extend(more);
        }
        body.to_string()
    };
    let (whole, pieces) = (ask(WORDS, json!({})), ask(WORDS, json!({"stream": true})));
    let other = ask(&format!("{WORDS}evil"), json!({}));
    let (field, chat, none) = (
        ask(WORDS, json!({WORDS: 1})),
        "/v1/completions",
        String::new,
    );
    for (what, target, body, evil) in [
        ("the list of models", "/v1/models", none(), true),
        ("an answer", chat, whole, true),
        ("an answer in pieces", chat, pieces, true),
        ("an unknown model", chat, other, true),
        ("an unknown field", chat, field, true),
        ("an unknown path", "/evil('alert')", none(), false),
        ("how it is", "/healthz", none(), false),
    ] {
        let mut client = TcpStream::connect(server.local_addr()).await?;
        send(&mut client, target, &body).await?;
        let Some((status, head, body)) = whole_answer(&mut client).await else {
            found.check(what, "an answer", "none", false);
            continue;
        };
        let field = |name: &str| {
            let mut lines = head.lines().filter_map(|line| line.split_once(": "));
            let line = lines.find(|(field, _)| field.eq_ignore_ascii_case(name));
            line.map(|(_, value)| value).unwrap_or_default()
        };
        let said = body.contains("evil");
        found.same(format!("{what}: the untrusted text in it"), evil, said);
        let kind = field("content-type");
        let held = SAFE.contains(&kind);
        let its_type = format!("{what} ({status}): its type");
        found.check(its_type, "a type that cannot run", kind, held);
        let what = format!("{what}: sniffing and script policy");
        let seen = [
            field("x-content-type-options"),
            field("content-security-policy"),
        ];
        let held = seen[0] == "nosniff" && seen[1].starts_with("default-src 'none';");
        found.check(what, "nothing", format!("{seen:?}"), held);
        let held = field("access-control-allow-origin").is_empty();
        found.check("other origins that may read it", "none", held, held);
    }
    Ok(())
}
