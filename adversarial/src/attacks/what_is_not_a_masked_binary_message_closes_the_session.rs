//! X08 speaks in binary messages and nothing else. What RFC 6455 forbids a client, and what it
//! allows but X08 has no use for, ends the session.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, Message, opcode};
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 7;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        // A frame that would be right if it came in the right wrapping.
        let ping = Frame::ping().encode(2);
        let binary = || Message::binary(ping.clone());
        let of = |opcode| vec![Message::of(opcode, ping.clone())];
        let attacks: Vec<(&str, Vec<Message>)> = vec![
            ("a text message", of(opcode::TEXT)),
            ("an empty text message", vec![Message::of(opcode::TEXT, [])]),
            ("the first reserved bit", vec![binary().reserved(0x40)]),
            ("the second reserved bit", vec![binary().reserved(0x20)]),
            ("the third reserved bit", vec![binary().reserved(0x10)]),
            ("a frame without a mask", vec![binary().unmasked()]),
            ("an opcode for data that does not exist", of(0x3)),
            ("an opcode for control that does not exist", of(0xb)),
            ("a continuation of nothing", of(opcode::CONTINUATION)),
            (
                "a message within a message",
                vec![binary().unfinished(), binary()],
            ),
            (
                "a text message within a message",
                vec![binary().unfinished(), Message::of(opcode::TEXT, [1])],
            ),
            (
                "a ping in fragments",
                vec![Message::of(opcode::PING, [0; 8]).unfinished()],
            ),
            (
                "a ping of more than 125 bytes",
                vec![Message::of(opcode::PING, [0; 126])],
            ),
            (
                "a close of more than 125 bytes",
                vec![Message::of(opcode::CLOSE, [0x0f; 126])],
            ),
        ];
        let mut found = Findings::new();
        for (what, messages) in attacks {
            let mut peer = bench.pipeline().await?;
            for message in messages {
                peer.send(message).await;
            }
            found.ended(what, CloseCode::WebSocket, &peer.ending().await);
        }
        let mut peer = bench.upgraded().await?;
        peer.send(Message::of(opcode::TEXT, *b"{}")).await;
        let what = "a text message instead of HELLO";
        found.ended(what, CloseCode::WebSocket, &peer.ending().await);

        // Not a WebSocket at all: there is no session that could be given a code.
        for (what, request) in [
            ("an HTTP head that never ends", vec![b'a'; 64 * 1024]),
            ("bytes that are not HTTP", vec![0xff; 100]),
            (
                "another path",
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            ),
        ] {
            let mut peer = bench.secured().await?;
            peer.write(&request).await;
            let ending = peer.ending().await;
            found.check(what, "no session", &ending, !ending.hung);
        }
        Ok(found.verdict())
    }
}
