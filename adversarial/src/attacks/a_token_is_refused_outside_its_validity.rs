//! A token is valid for minutes, and hosts tolerate a clock skew of seconds. A token that is valid
//! for years, or only from tomorrow on, is refused.

use hearthnet_bus::Grant;

use super::prelude::*;

/// More than the 30 s of clock skew that the victim tolerates, with room for a slow machine.
const SKEW: u64 = 40;

const DAY: u64 = 86_400;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let attacker = &bench.attacker;
    // `not_before` is the current time.
    type Change = fn(&mut Grant);
    let changes: [(&str, Change); 4] = [
        ("expired a moment beyond the skew", |grant| {
            grant.expires = grant.not_before - SKEW;
            grant.not_before = grant.expires - 60;
        }),
        ("expired yesterday", |grant| {
            grant.expires = grant.not_before - DAY;
            grant.not_before = grant.expires - 60;
        }),
        ("not yet valid, a moment beyond the skew", |grant| {
            grant.not_before += SKEW;
            grant.expires = grant.not_before + 60;
        }),
        ("for tomorrow", |grant| {
            grant.not_before += DAY;
            grant.expires = grant.not_before + 60;
        }),
    ];
    for (what, change) in changes {
        let mut grant = bench.grant(attacker)?;
        change(&mut grant);
        let ending = bench.show(grant.sign(attacker)?).await?;
        found.ended(what, CloseCode::TokenExpired, &ending);
    }
    Ok(())
}
