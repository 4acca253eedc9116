//! A host that is revoked or demoted may never learn of it, or may ignore it. Access therefore ends
//! at the caller: as soon as the caller's log has the event, the caller closes everything open to
//! that host and sends it no further step. Here the host's node never receives the event, so it
//! would go on serving.

use hearthnet_orchestrator::error::ChatError;
use tokio::sync::{mpsc, oneshot};

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let revoked = |node| Body::Revoked { node, last_seq: 1 };
    let demoted = |node| level_change(node, Level::Member, 1);
    lose(bench, found, "revoked", revoked).await?;
    lose(bench, found, "demoted", demoted).await
}

/// Asks a question over a host, revokes or demotes the host, and continues the conversation.
async fn lose(
    bench: &mut Bench,
    found: &mut Findings,
    how: &str,
    ends: fn(NodeId) -> Body,
) -> Result<()> {
    let home = bench.community()?.home(how)?;
    let mut host = bench.another(&home).await?;
    let key = NodeKey::load(&home.join(KEY_FILE))?;
    let log = bench.community()?.copy(&format!("asks-{how}"))?;
    let advertised = Body::ShardAdvertised(Box::new(host.descriptor.clone()));
    log.append(&key, advertised, now_ms())?;

    let [_, caller] = bench.members();
    let (answered, first) = oneshot::channel();
    let (go_on, goes_on) = mpsc::channel(1);
    let (asked, runtime) = (log.clone(), Handle::current());
    let model = bench.which.description();
    let asking = tokio::task::spawn_blocking(move || {
        let fleet = Fleet::of(&model, MODEL_ID, runtime, None)?;
        converse(&fleet, caller, &asked, answered, goes_on)
    });
    let tokens = first.await?;
    found.same(format!("{how}: tokens before"), TOKENS, tokens);
    let kept = host.gauges().await?;
    found.same(format!("{how}: open streams"), 1, kept.streams);

    // The caller learns of it, the host does not.
    bench.community()?.append(ends(host.node));
    bench.community()?.tell(&log);
    let left = until(&mut host, |gauges| gauges.sessions == 0).await?;
    let what = format!("{how}: sessions without a question");
    found.same(what, 0, left.sessions);
    go_on.send(()).await?;
    let next = asking.await??;
    let what = format!("{how}: the next turn, with no other host");
    found.same(what, "no host", next);
    let after = host.gauges().await?;
    let what = format!("{how}: steps received since");
    found.same(what, 0, after.steps - left.steps);
    found.same(format!("{how}: sessions since"), 0, after.sessions);
    host.kill().await
}

/// Two turns of a conversation over the hosts that the log names. `answered` receives the token
/// count of the first answer; the second turn starts after `goes_on`. Returns the outcome.
fn converse(
    fleet: &Fleet,
    caller: NodeKey,
    log: &EventLog,
    answered: oneshot::Sender<u32>,
    mut goes_on: mpsc::Receiver<()>,
) -> Result<String> {
    let mut conversation = fleet.community(caller, log)?;
    let first = fleet.answer(&mut conversation, PROMPT)?;
    let tokens = u32::try_from(first.token_ids.len()).unwrap_or(u32::MAX);
    // The receiver is gone only if the attack has failed already.
    let _ = answered.send(tokens);
    let _ = goes_on.blocking_recv();
    Ok(match fleet.answer(&mut conversation, PROMPT + TOKENS) {
        Ok(_) => "an answer".to_owned(),
        Err(ChatError::ShardUnavailable(_)) => "no host".to_owned(),
        Err(other) => other.to_string(),
    })
}
