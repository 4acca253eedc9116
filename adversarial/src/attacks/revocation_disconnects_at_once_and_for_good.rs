//! Revocation must not wait until the member disconnects. All of its connections end as soon as the
//! host's log has the revocation. Afterwards the key is refused, and so are grants issued before
//! the revocation.

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let target = bench.target;

    // One connection of each kind that a member can have, each in use.
    let hello = Hello::new("pipeline", target.token(&attacker).await?);
    let mut session = bench.session(&hello).await?;
    found.opened("a stream before", &session.ask(bench.stream_open(1)).await);
    found.answered("a step before", &session.ask(bench.zeros(1, 1).frame()).await);
    let unused = target.token(&attacker).await?;
    let note = bench.community()?.attacker.note(10, 1);
    let mut gossip = bench.gossip(&attacker).await?;
    found.taken("an event before", (1, 0), None, &gossip.push(&[note]).await);
    let (mut bus, answer) = bench.upgrade(&attacker, "/bus/v1").await?;
    let open = answer.starts_with(SWITCHING);
    found.holds("a socket for calls before", "open", open);
    let mut other = Call::open(&target, &guest, 16).await?;
    let before = other.step(1, 0).await.map_err(HarnessError::Honest)?;

    let last_seq = bench.victim.gauges().await?.events_of(&attacker.id());
    bench.community()?.append(Body::Revoked {
        node: attacker.id(),
        last_seq,
    });
    let is_out = |gauges: &Gauges| gauges.has_revoked(&attacker.id());
    let expected = "has the revocation";
    bench
        .wait_until(found, "the host", expected, is_out)
        .await?;

    let code = CloseCode::Revoked;
    found.ended("the open session", code, &session.ending().await);
    found.gossip_ended("the open gossip", code, &gossip.ending().await);
    let ending = loop {
        match bus.message().await {
            Came::Message(_) => {}
            Came::Close(code) => break Pushed::Closed(code),
            Came::End | Came::Nothing => break Pushed::Closed(None),
        }
    };
    found.gossip_ended("the open socket for calls", code, &ending);

    for path in ["/tensor/v1", "/sync/v1", "/bus/v1"] {
        let (_, answer) = bench.upgrade(&attacker, path).await?;
        let refused = "x-hearthnet-refused: revoked";
        let held = answer.starts_with("HTTP/1.1 403") && answer.contains(refused);
        let seen = if held {
            "403 revoked"
        } else {
            answer.lines().next().unwrap_or("no answer")
        };
        let what = format!("the same key again at {path}");
        found.counted(what, "403 revoked", seen, held, code.as_str());
    }
    // A grant is bound to its bearer: it is refused with another key too.
    let mut peer = Peer::upgraded(target.addr, &Credentials::of(&guest.secret())).await?;
    peer.send(Hello::new("pipeline", unused).frame()).await;
    let ending = peer.ending().await;
    let what = "an earlier grant, presented by another member";
    found.ended(what, CloseCode::TokenSubject, &ending);

    let after = other.step(1, 0).await;
    let same = after.as_ref() == Ok(&before);
    found.check_or("another member's session", "the same answer", same, || {
        after.err().unwrap_or_else(|| "another answer".to_owned())
    });
    other.close().await.map_err(HarnessError::Honest)?;
    bench.still_works(found).await
}
