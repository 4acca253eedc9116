//! A token holds for minutes, and clocks may differ by seconds: a bounded number of them. One
//! that holds for years, or that was made for tomorrow, is a key under the mat.

use hearthnet_bus::Grant;
use hearthnet_transport::CloseCode;

use crate::{Bench, Findings, HarnessError};

/// More than the 30 s by which the victim forgives a clock, with room for a slow machine.
const SKEW: u64 = 40;

const DAY: u64 = 86_400;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let attacker = &bench.attacker;
    // `not_before` is now.
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
