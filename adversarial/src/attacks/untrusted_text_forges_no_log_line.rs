//! A host sends error texts, and a daemon logs them. On the terminal of a reader, such text could
//! be an escape sequence, change the writing direction, or look like a log line of the daemon.

use std::sync::Arc;

use hearthnet_shard::{RunningHost, StreamFault};
use hearthnet_text::is_plain;
use serde_json::json;

use super::prelude::*;
use crate::fleet::tampered_host;
use crate::household::ask;
use crate::program::Program;

/// Error text of the host, in every failure.
const FORGED: &str = "2026-01-01T00:00:00.000000Z ERROR evil";

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    std::fs::create_dir_all(&data)?;
    let caller = NodeKey::load_or_create(&data.join(KEY_FILE))?;
    let (_host, at) = lying(&caller).await?;
    let models = folder.path().join("models");
    std::fs::create_dir_all(&models)?;
    let file = Model::Tiny
        .description()
        .write(&models)
        .display()
        .to_string();

    let program = Program::new(bench.program(), folder.path(), &data);
    let daemon = program.serve(&["--model", &file, "--shard", &at]).await?;
    let (_, listed) = ask(daemon.http(), "/v1/models", "")
        .await?
        .unwrap_or_default();
    let listed: serde_json::Value = serde_json::from_str(&listed)?;
    let body = json!({ "model": listed["data"][0]["id"], "prompt": "hello", "max_tokens": 2 });
    let told = ask(daemon.http(), "/v1/completions", &body.to_string()).await?;
    let claim = "a question over the host";
    found.check(claim, "answered", told.is_some(), told.is_some());
    let log = daemon.stop().await?;
    // `chat` does not log; it prints the error as a line of its own.
    let question = [
        "chat",
        "hello",
        "--model",
        &file,
        "--shard",
        &at,
        "--max-tokens",
        "2",
    ];
    let chat = program.says(&question).await?.errors;
    for (what, said) in [("the daemon's log", &log), ("the output of a chat", &chat)] {
        let told = said.contains("evil");
        let words = format!("{what}: the host's text");
        found.check_or(words, "shown", told, || said.clone());
        let acts = |c: &char| *c != '\n' && !is_plain(*c);
        let acts: String = said.chars().filter(acts).collect();
        let of = format!("{what}: control characters");
        found.same(of, "\"\"", format!("{acts:?}"));
        let forged = said.lines().filter(|line| line.starts_with(FORGED));
        let of = format!("{what}: lines forged by the host");
        found.same(of, 0, forged.count());
    }
    Ok(())
}

/// Host that fails at each step, and its name for the command line.
async fn lying(caller: &NodeKey) -> Result<(RunningHost, String)> {
    let (key, tiny) = (new_key()?, Model::Tiny.description());
    let file = Arc::new(tiny.file());
    let weights = file.manifest(&mut |_, _| {}).weights_id();
    let tamper: Tamper = Box::new(|passing| {
        let reason = format!("no\u{1b}]0;owned\u{7}\u{202e}\n{FORGED}\u{9b}2J");
        *passing.fault = Some(StreamFault::WeightsUnavailable { reason });
    });
    let host = tampered_host(&file, ("tiny", weights), caller.id(), &key, tamper).await?;
    let at = format!("{}#{}", host.local_addr(), key.id());
    Ok((host, at))
}
