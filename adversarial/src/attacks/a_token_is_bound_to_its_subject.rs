//! HELLO carries the token to the host, so a node that receives one by mistake could present it
//! over a channel of its own. The subject of a token must be the key of the TLS handshake. A failed
//! attempt by another node does not use the token up.

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let owner = &bench.honest_key;
    let stolen = bench.grant(owner)?.sign(owner)?;
    for what in ["another node's token", "another node's token, again"] {
        let ending = bench.show(stolen.clone()).await?;
        found.ended(what, CloseCode::TokenSubject, &ending);
    }
    let hello = Hello::new("pipeline", stolen);
    let peer = Peer::upgraded(bench.target.addr, &Credentials::of(&owner.secret())).await?;
    let opened = peer.greeted(&hello).await;
    found.done("its owner, afterwards", "a session", opened);
    Ok(())
}
