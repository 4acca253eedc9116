//! Whoever gets hold of a code with many uses could fill the community with nodes of its own in a
//! minute, all called like somebody. Only so many join with one code at a time; who comes after
//! them waits, and others with another code do not.

use std::time::{Duration, Instant};

use hearthnet_bus::Capability;
use hearthnet_bus::invite::Invite;
use hearthnet_bus::joining::JOINS_PER_CODE;
use hearthnet_bus::log::Level;

use crate::bench::new_key;
use crate::victim::Gauges;
use crate::{Bench, Findings, HarnessError};

/// How long one is asked again.
const PATIENCE: Duration = Duration::from_secs(60);

/// Nodes that are made up: a few more than are let in.
const CROWD: usize = JOINS_PER_CODE + 4;

/// How the host answers a new node with this code, when it is not only too soon to ask, or too late.
async fn join(bench: &Bench, invite: &Invite) -> Result<String, HarnessError> {
    let begin = Instant::now();
    loop {
        let answer = ask(bench, invite).await?;
        let again = ["rate_limited", "unreachable"].contains(&answer.as_str());
        if !again || begin.elapsed() > PATIENCE {
            return Ok(answer);
        }
        // Strangers' calls have a budget that fills again with time; and a machine that is busy otherwise may
        // let one go that has not said what it wants within its deadline.
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

async fn ask(bench: &Bench, invite: &Invite) -> Result<String, HarnessError> {
    let key = new_key()?;
    let client = bench.target.client(&key).await?;
    let params = serde_json::to_value(invite.request(key.id(), "kim")?)?;
    let capability: Capability = "community.join@1.0".parse()?;
    Ok(match client.call(&capability, &params)?.result().await {
        Ok(_) => "a member".to_owned(),
        Err(error) => error.code().to_string(),
    })
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let anchor = bench.test_community()?.anchor();
    let test_community = bench.test_community()?;
    let [crowds, honest] = [49, 1].map(|uses| test_community.invite(Level::Member, uses));
    let written = test_community.events_of(&anchor);
    let heard = |gauges: &Gauges| gauges.events_of(&anchor) >= written;
    bench
        .comes_to(found, "the host hears of the codes", "it does", heard)
        .await?;
    let mut let_in = 0;
    for n in 1..=CROWD {
        let answer = join(bench, &crowds).await?;
        let expected = match n <= JOINS_PER_CODE {
            true => "a member",
            false => "busy",
        };
        found.same(
            format!("node {n} of a crowd with one code"),
            expected,
            &answer,
        );
        let_in += usize::from(answer == "a member");
    }
    found.same("how many are in", JOINS_PER_CODE, let_in);
    let answer = join(bench, &honest).await?;
    found.same("a neighbour with a code of its own", "a member", answer);
    bench.goes_on(found).await
}
