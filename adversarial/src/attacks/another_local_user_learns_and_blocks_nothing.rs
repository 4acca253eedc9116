//! Without an API key, all programs of a machine may use its HTTP interface, including those of
//! other users. Prefix cache hits would reveal the owner's prompts to them, and their own long
//! answers under many names would make the owner wait.
//!
//! Users are told apart by the system's socket table. To test this, a thread of this process
//! switches to another uid, which needs root. Without root, only the owner's side is tested here,
//! and the rest by the tests of `crates/hearthnet-platform/src/linux/peer.rs`.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::prelude::*;
use crate::household::{MODEL, answer, connect_as_nobody, interface, send, service};

const TARGET: &str = "/v1/completions";
/// Long answers that the other user requests, each under its own name: more than can run and queue.
const HOG: usize = 40;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let service = service()?;
    let server = interface(service.clone()).await?;
    let at = server.local_addr();
    let secret = "the number of the owner's card ends with 4711, and that is a secret";
    let cached = |answer: Option<Value>| {
        let count = answer?["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()?;
        Some(count)
    };
    let first = cached(own(at, secret).await?);
    let told = "cached tokens of a new prompt";
    found.same(told, "Some(0)", format!("{first:?}"));
    let second = cached(own(at, secret).await?);
    let held = second.is_some_and(|count| count > 0);
    let told = "cached tokens of the owner's earlier prompt";
    found.check(told, "some", format!("{second:?}"), held);

    let Some(mut streams) = connect_as_nobody(at, HOG + 1).await? else {
        let what = "another user";
        found.check(what, "none: this process is not root", "none", true);
        return Ok(());
    };
    if let Some(mut spy) = streams.pop() {
        let told = cached(ask(&mut spy, secret, 2, "").await?);
        let what = "cached tokens reported to another user";
        found.same(what, "Some(0)", format!("{told:?}"));
    }
    for (n, hog) in streams.iter_mut().enumerate() {
        let body = json!({
            "model": MODEL, "prompt": "hello", "temperature": 0, "max_tokens": 4000, "stream": true,
            "user": format!("one of many, {n}"),
        });
        send(hog, TARGET, &body.to_string()).await?;
    }
    for n in 1..=3 {
        let answered = own(at, "hello").await?.is_some();
        let what = format!("question {n} of the owner beside {HOG} long ones of another user");
        found.check(what, "answered soon", answered, answered);
    }
    let load = service.load();
    let (running, waiting) = (load.running, load.waiting);
    let held = running > 0 && waiting > 0;
    let seen = format!("{running} run, {waiting} wait");
    let what = "the long answers meanwhile";
    found.check(what, "some run, some wait", seen, held);
    Ok(())
}

/// Answer to the owner, on a connection of its own.
async fn own(at: SocketAddr, prompt: &str) -> Result<Option<Value>> {
    ask(&mut TcpStream::connect(at).await?, prompt, 2, "").await
}

async fn ask(
    stream: &mut TcpStream,
    prompt: &str,
    tokens: u32,
    user: &str,
) -> Result<Option<Value>> {
    let body = json!({
        "model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": tokens, "user": user,
    });
    send(stream, TARGET, &body.to_string()).await?;
    let answer = answer(stream).await.filter(|(status, _)| *status == 200);
    Ok(answer.and_then(|(_, body)| serde_json::from_str(&body).ok()))
}
