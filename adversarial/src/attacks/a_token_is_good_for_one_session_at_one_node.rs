//! Whoever sees a token must not be able to use it again: not at the node that it was made for,
//! which remembers it, and not at another one, which it does not name.

use hearthnet_bus::NodeKey;
use hearthnet_transport::CloseCode;

use crate::bench::sign;
use crate::raw::Hello;
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 18;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let attacker = bench.attacker();
        let code = CloseCode::TokenReplayed;

        let token = sign(&bench.grant(attacker)?, attacker)?;
        let hello = Hello::new("pipeline", token.clone());
        let session = bench.session(&hello).await?;
        let again = bench.show(token.clone()).await?;
        found.ended("again, while the session is open", code, &again);
        drop(session);
        let again = bench.show(token.clone()).await?;
        found.ended("again, when the session is over", code, &again);

        // All HELLOs are on their way before the first answer is read.
        let token = sign(&bench.grant(attacker)?, attacker)?;
        let mut peers = Vec::new();
        for _ in 0..8 {
            peers.push(bench.upgraded().await?);
        }
        for peer in &mut peers {
            peer.send(Hello::new("pipeline", token.clone()).frame())
                .await;
        }
        let mut opened = 0;
        for peer in &mut peers {
            match peer.receive().await {
                hello if hello.is(crate::raw::kind::HELLO) => opened += 1,
                other => {
                    let ending = peer.ending_after(other).await;
                    found.ended("one of eight at once", code, &ending);
                }
            }
        }
        let what = "sessions of eight HELLOs with one token";
        found.check(what, "1", opened, opened == 1);

        let elsewhere = NodeKey::generate()
            .map_err(|error| HarnessError::Attacker(error.to_string()))?
            .id();
        let mut grant = bench.grant(attacker)?;
        grant.audience = elsewhere;
        let ending = bench.show(sign(&grant, attacker)?).await?;
        found.ended(
            "a token for another node",
            CloseCode::TokenAudience,
            &ending,
        );
        Ok(found.verdict())
    }
}
