//! A host that is revoked or demoted may never learn of it, or may ignore it. Access therefore ends
//! at the caller: as soon as the caller's log has the event, the caller closes everything open to
//! that host and sends it no further step. Here the host's node never receives the event, so it
//! would go on serving.

use std::sync::Arc;
use std::time::Instant;

use hearthnet_bus::log::{Body, EventLog, Level};
use hearthnet_bus::node::Connections;
use hearthnet_bus::{NodeId, NodeKey, now_ms};
use hearthnet_orchestrator::Cancel;
use hearthnet_orchestrator::chat::{Conversation, Frame};
use hearthnet_orchestrator::error::ChatError;
use hearthnet_orchestrator::hosts::{CommunityHosts, Links};
use hearthnet_transport::Config;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use crate::fleet::{Fleet, PROMPT, TOKENS, question};
use crate::victim::until;
use crate::victim::{KEY_FILE, MODEL_ID};
use crate::{Bench, Findings, HarnessError};

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let revoked = |node| Body::Revoked { node, last_seq: 1 };
    let demoted = |node| Body::LevelChanged {
        node,
        level: Level::Member,
        last_seq: Some(1),
    };
    lose(bench, found, "revoked", revoked).await?;
    lose(bench, found, "demoted", demoted).await
}

/// Asks a question over a host, revokes or demotes the host, and continues the conversation.
async fn lose(
    bench: &mut Bench,
    found: &mut Findings,
    how: &str,
    ends: fn(NodeId) -> Body,
) -> Result<(), HarnessError> {
    let home = bench.test_community()?.home(how)?;
    let mut host = bench.another(&home).await?;
    let key = NodeKey::load(&home.join(KEY_FILE))?;
    let log = bench.test_community()?.copy(&format!("asks-{how}"))?;
    let advertised = Body::ShardAdvertised(Box::new(host.descriptor.clone()));
    log.append(&key, advertised, now_ms())?;

    let [_, caller] = bench.members();
    let (answered, first) = oneshot::channel();
    let (go_on, goes_on) = mpsc::channel(1);
    let (asked, runtime) = (log.clone(), Handle::current());
    let model = bench.which.description();
    let asking = tokio::task::spawn_blocking(move || {
        let fleet = Fleet::of(&model, MODEL_ID, runtime.clone(), None)?;
        converse(&fleet, &runtime, caller, &asked, answered, goes_on)
    });
    let tokens = first.await?;
    found.same(format!("{how}: tokens before"), TOKENS, tokens);
    let kept = host.gauges().await?;
    found.same(format!("{how}: open streams"), 1, kept.streams);

    // The caller learns of it, the host does not.
    bench.test_community()?.append(ends(host.node));
    bench.test_community()?.tell(&log);
    let left = until(&mut host, |gauges| gauges.sessions == 0).await?;
    found.same(
        format!("{how}: sessions without a question"),
        0,
        left.sessions,
    );
    go_on.send(()).await?;
    let next = asking.await??;
    found.same(
        format!("{how}: the next turn, with no other host"),
        "no host",
        next,
    );
    let after = host.gauges().await?;
    found.same(
        format!("{how}: steps received since"),
        0,
        after.steps - left.steps,
    );
    found.same(format!("{how}: sessions since"), 0, after.sessions);
    host.kill().await
}

/// Two turns of a conversation over the hosts that the log names. `answered` receives the token
/// count of the first answer; the second turn starts after `goes_on`. Returns the outcome.
fn converse(
    fleet: &Fleet,
    runtime: &Handle,
    caller: NodeKey,
    log: &EventLog,
    answered: oneshot::Sender<u32>,
    mut goes_on: mpsc::Receiver<()>,
) -> Result<String, HarnessError> {
    let choice = fleet.choice(caller.id());
    let connections = runtime.block_on(async { Connections::watched(log.clone()) });
    let source = CommunityHosts::new(
        runtime.clone(),
        Arc::new(caller),
        log.clone(),
        Config::default(),
        choice.clone(),
        Links::new(connections, choice.health),
    );
    let backend = fleet.backend(Box::new(source))?;
    let mut conversation = Conversation::new(Box::new(backend));
    let cancel = Cancel::default();
    let mut ask = |tokens| {
        let (mut hear, now) = (|_: &Frame| {}, Instant::now());
        conversation.answer(
            &fleet.text,
            &question(tokens, TOKENS),
            now,
            &cancel,
            &mut hear,
        )
    };
    let first = ask(PROMPT)?;
    let tokens = u32::try_from(first.token_ids.len()).unwrap_or(u32::MAX);
    // The receiver is gone only if the attack has failed already.
    let _ = answered.send(tokens);
    let _ = goes_on.blocking_recv();
    Ok(match ask(PROMPT + TOKENS) {
        Ok(_) => "an answer".to_owned(),
        Err(ChatError::ShardUnavailable(_)) => "no host".to_owned(),
        Err(other) => other.to_string(),
    })
}
