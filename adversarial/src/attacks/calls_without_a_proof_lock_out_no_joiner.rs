//! Strangers may call one method only, and share a common budget. Calls without a valid code could
//! use that budget up and keep out a joiner with a valid one.

use hearthnet_bus::calls::Code;
use hearthnet_bus::joining;
use serde_json::json;

use super::prelude::*;

/// Connections of strangers, and calls on each: several times the common budget.
const CONNECTIONS: usize = 10;
const CALLS: usize = 4;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let invite = bench.community()?.invite(Level::Member, 2);
    let community = bench.community()?.id();
    bench.wait_for_agreement(found).await?;
    // Generated code: its proofs are well formed, but its invite does not exist.
    let day = now_ms() / 1000 + 86_400;
    let made_up = Invite::generate(community, day, Vec::new())?;
    let mut limited = 0;
    for _ in 0..CONNECTIONS {
        let key = new_key()?;
        let client = bench.target.client(&key).await?;
        let request = json!(made_up.request(key.id(), "kim")?);
        for _ in 0..CALLS {
            let call = client.call(&joining::descriptor().capability, &request)?;
            let refusal = call.result().await.err();
            limited += usize::from(refusal.is_some_and(|e| *e.code() == Code::RATE_LIMITED));
        }
    }
    let what = "calls without a proof, above the strangers' budget";
    found.check(what, "some refused", limited, limited > 0);
    let joined = bench.join(&invite).await;
    found.done("a joiner with a code, at the same time", "admitted", joined);
    bench.still_works(found).await
}
