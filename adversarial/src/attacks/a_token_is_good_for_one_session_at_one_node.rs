//! A token that was observed must not be usable again: not at its own node, which remembers it, and
//! not at another node, which it does not name.

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let attacker = &bench.attacker;
    let code = CloseCode::TokenReplayed;

    let token = bench.grant(attacker)?.sign(attacker)?;
    let hello = Hello::new("pipeline", token.clone());
    let session = bench.session(&hello).await?;
    let again = bench.show(token.clone()).await?;
    found.ended("again, while the session is open", code, &again);
    drop(session);
    let again = bench.show(token).await?;
    found.ended("again, when the session is over", code, &again);

    // All HELLOs are sent before the first answer is read.
    let token = bench.grant(attacker)?.sign(attacker)?;
    let hello = Hello::new("pipeline", token);
    let mut peers = Vec::new();
    for _ in 0..8 {
        peers.push(bench.upgraded().await?);
    }
    for peer in &mut peers {
        peer.send(hello.frame()).await;
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
    found.same(what, 1, opened);

    let mut grant = bench.grant(attacker)?;
    grant.audience = new_key()?.id();
    let ending = bench.show(grant.sign(attacker)?).await?;
    let code = CloseCode::TokenAudience;
    found.ended("a token for another node", code, &ending);
    Ok(())
}
