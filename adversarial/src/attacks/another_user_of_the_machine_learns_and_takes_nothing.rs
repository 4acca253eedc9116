//! Without a key every program of a machine may ask its HTTP interface, another user's as well. How much
//! of a prompt was held already would tell it what its owner has asked; and its own long answers,
//! in as many names as it likes, would keep the owner waiting.
//!
//! Users are told apart by the system's table of sockets. This needs somebody who is another user: a
//! thread of this process becomes one, which root may (and nobody else: then only the owner's side
//! is shown here, and the rest by the tests of `hearthnet-http/src/peer.rs`).

use std::net::SocketAddr;

use hearthnet_http::HttpSettings;
use hearthnet_orchestrator::http;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::household::{MODEL, answer, connect_as_nobody, send, service};
use crate::{Bench, Findings, HarnessError};

const TARGET: &str = "/v1/completions";
/// Long answers that the other user asks for, each in a name of its own: more than may run and wait.
const HOG: usize = 40;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let settings = HttpSettings {
        listen: "127.0.0.1:0".to_owned(),
        ..HttpSettings::default()
    };
    let service = service()?;
    let server = http::serve(service.clone(), None, &settings).await;
    let server = server.map_err(HarnessError::victim)?;
    let at = server.local_addr();
    let secret = "the number of the owner's card ends with 4711, and that is a secret";
    let cached = |answer: Option<Value>| {
        let count = answer?["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()?;
        Some(count)
    };
    let first = cached(own(at, secret).await?);
    found.same(
        "cached, of what nobody has asked",
        "Some(0)",
        format!("{first:?}"),
    );
    let second = cached(own(at, secret).await?);
    let held = second.is_some_and(|count| count > 0);
    found.check(
        "cached, of what its owner has asked before",
        "some",
        format!("{second:?}"),
        held,
    );

    let Some(mut streams) = connect_as_nobody(at, HOG + 1).await? else {
        found.check(
            "another user",
            "none, for this process is not root's",
            "none",
            true,
        );
        return Ok(());
    };
    if let Some(mut spy) = streams.pop() {
        let told = cached(ask(&mut spy, secret, 2, "").await?);
        found.same(
            "cached, told to another user",
            "Some(0)",
            format!("{told:?}"),
        );
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
    found.check("the long ones meanwhile", "some run, some wait", seen, held);
    Ok(())
}

/// What the owner is answered, on a connection of its own.
async fn own(at: SocketAddr, prompt: &str) -> Result<Option<Value>, HarnessError> {
    ask(&mut TcpStream::connect(at).await?, prompt, 2, "").await
}

async fn ask(
    stream: &mut TcpStream,
    prompt: &str,
    tokens: u32,
    user: &str,
) -> Result<Option<Value>, HarnessError> {
    let body = json!({
        "model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": tokens, "user": user,
    });
    send(stream, TARGET, &body.to_string()).await?;
    let answer = answer(stream).await.filter(|(status, _)| *status == 200);
    Ok(answer.and_then(|(_, body)| serde_json::from_str(&body).ok()))
}
