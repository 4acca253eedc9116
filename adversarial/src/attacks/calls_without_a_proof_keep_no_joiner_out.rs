//! Strangers may ask for one thing, and share what a node has to spare for strangers. Whoever asks
//! without a code could use that up, and nobody with one would get in.

use std::sync::Arc;

use hearthnet_bus::calls::{Client, Code};
use hearthnet_bus::invite::Invite;
use hearthnet_bus::joining;
use hearthnet_bus::log::Level;
use hearthnet_bus::node::bus_rule;
use hearthnet_transport::{Config, connect_path};
use serde_json::json;

use crate::bench::new_key;
use crate::raw::event::now_ms;
use crate::{Bench, Findings, HarnessError};

/// Connections of strangers, and calls of each: several times what all strangers may do at once.
const CONNECTIONS: usize = 10;
const CALLS: usize = 4;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let invite = bench.test_community()?.invite(Level::Member, 2);
    let community = bench.test_community()?.id();
    bench.agrees(found).await?;
    // A code that nobody has made: its proofs are sound, and of an invite that there is not.
    let day = now_ms() / 1000 + 86_400;
    let made_up = Invite::generate(community, day, Vec::new()).map_err(HarnessError::attacker)?;
    let mut limited = 0;
    for _ in 0..CONNECTIONS {
        let key = new_key()?;
        let (addr, identity) = (bench.target.addr.to_string(), key.identity());
        let identity = identity.map_err(HarnessError::attacker)?;
        let (expected, rule) = (Some(bench.target.node), bus_rule());
        let socket = connect_path(&addr, &identity, expected, &rule, &Config::default()).await;
        let request = made_up.request(key.id(), "kim");
        let request = json!(request.map_err(HarnessError::attacker)?);
        let client = Client::new(socket.map_err(HarnessError::attacker)?, Arc::new(key));
        for _ in 0..CALLS {
            let call = client.call(&joining::descriptor().capability, &request);
            let call = call.map_err(HarnessError::attacker)?;
            let refusal = call.result().await.err();
            limited += usize::from(refusal.is_some_and(|e| *e.code() == Code::RATE_LIMITED));
        }
    }
    let what = "calls without a proof, beyond what strangers may do";
    found.check(what, "some refused", limited, limited > 0);
    let joined = bench.join(&invite).await;
    found.done("somebody with a code joins at once", "admitted", joined);
    bench.goes_on(found).await
}
