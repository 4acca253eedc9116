//! A token travels to the host in HELLO, so a node that it was shown to by mistake could show it
//! again, over a channel of its own. Its subject must be the key that the TLS handshake proved.
//! And having been shown by a thief does not make it worthless to its owner.

use hearthnet_transport::CloseCode;

use crate::raw::{Credentials, Hello, Peer};
use crate::{Bench, Findings, HarnessError};

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let owner = &bench.honest_key;
    let stolen = bench.grant(owner)?.sign(owner)?;
    for what in ["another node's token", "the same once more"] {
        let ending = bench.show(stolen.clone()).await?;
        found.ended(what, CloseCode::TokenSubject, &ending);
    }
    let hello = Hello::new("pipeline", stolen);
    let peer = Peer::upgraded(bench.target.addr, &Credentials::of(&owner.secret())).await?;
    let opened = peer.greeted(&hello).await;
    found.done("its owner, afterwards", "a session", opened);
    Ok(())
}
