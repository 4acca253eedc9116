//! With a stolen multi-use code, an attacker could fill the community with its own nodes within a
//! minute, all under similar names. Only a few nodes can join at a time with one code. Later ones
//! wait, and joiners with another code do not.

use std::time::{Duration, Instant};

use hearthnet_bus::joining::JOINS_PER_CODE;

use super::prelude::*;

/// Time limit for retries.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Nodes that try to join: a few more than the limit.
const CROWD: usize = JOINS_PER_CODE + 4;

/// Result of joining with this code, retried while the host limits the rate or is unreachable.
async fn join(bench: &Bench, invite: &Invite) -> Result<String> {
    let begin = Instant::now();
    loop {
        let answer = ask(bench, invite).await?;
        let again = ["rate_limited", "unreachable"].contains(&answer.as_str());
        if !again || begin.elapsed() > TIMEOUT {
            return Ok(answer);
        }
        // The call budget of strangers refills over time, and a busy machine may miss the deadline
        // of a connection.
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

async fn ask(bench: &Bench, invite: &Invite) -> Result<String> {
    let key = new_key()?;
    let client = bench.target.client(&key).await?;
    let params = serde_json::to_value(invite.request(key.id(), "kim")?)?;
    let capability: Capability = "community.join@1.0".parse()?;
    Ok(match client.call(&capability, &params)?.result().await {
        Ok(_) => "a member".to_owned(),
        Err(error) => error.code().to_string(),
    })
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let anchor = bench.community()?.anchor();
    let test_community = bench.community()?;
    let [crowds, honest] = [49, 1].map(|uses| test_community.invite(Level::Member, uses));
    let written = test_community.events_of(&anchor);
    let heard = |gauges: &Gauges| gauges.events_of(&anchor) >= written;
    bench
        .wait_until(found, "the host has the invites", "it does", heard)
        .await?;
    let mut let_in = 0;
    for n in 1..=CROWD {
        let answer = join(bench, &crowds).await?;
        let expected = match n <= JOINS_PER_CODE {
            true => "a member",
            false => "busy",
        };
        let what = format!("node {n} of a crowd with one code");
        found.same(what, expected, &answer);
        let_in += usize::from(answer == "a member");
    }
    found.same("nodes that joined", JOINS_PER_CODE, let_in);
    let answer = join(bench, &honest).await?;
    found.same("a neighbour with a code of its own", "a member", answer);
    bench.still_works(found).await
}
