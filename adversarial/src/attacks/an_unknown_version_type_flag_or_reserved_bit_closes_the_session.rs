//! What this version does not know it does not guess: no frame is skipped, no flag ignored, no
//! older version fallen back to. Otherwise two implementations could disagree on what was said,
//! and a later version's meaning could not be trusted.

use ciborium::Value;
use hearthnet_transport::CloseCode;

use crate::raw::{Frame, Step, chunk, dtype, flag, kind};
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 3;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut frames: Vec<(String, Frame)> = Vec::new();
        for version in [0, 2, 0xff] {
            frames.push((format!("version {version}"), Frame::ping().version(version)));
        }
        for kind in [0x00, 0x0a, 0x0f, 0x1a, 0x80, 0xff] {
            frames.push((format!("type {kind:#04x}"), Frame::new(kind, [0; 8])));
        }
        for reserved in [0x0001, 0x0100, 0xffff] {
            let what = format!("{reserved:#06x} in the reserved field");
            frames.push((what, Frame::ping().reserved(reserved)));
        }
        for flags in [flag::COMPRESSED, flag::FINAL, 0x10, 0x8000_0000] {
            frames.push((
                format!("flags {flags:#x} on a PING"),
                Frame::ping().flags(flags),
            ));
        }
        for flags in [flag::GRAD, flag::ENCRYPTED, 0x10, 0x8000_0000] {
            let body = chunk(1, dtype::I8, &[4], &[0; 4]);
            let frame = Frame::new(kind::TENSOR_DATA, body).flags(flag::FINAL | flags);
            frames.push((format!("flags {flags:#x} on a tensor"), frame));
        }
        let step = Step {
            reserved: [0, 0, 0, 0, 0, 1],
            ..Step::default()
        };
        frames.push(("a reserved byte in STEP".to_owned(), step.frame()));

        let mut found = Findings::new();
        for (what, frame) in frames {
            let mut peer = bench.stream().await?;
            peer.send(frame).await;
            found.ended(what, CloseCode::FrameUnknown, &peer.ending().await);
        }

        for (what, versions) in [
            ("HELLO with a later version only", vec![2.into()]),
            ("HELLO with version 0 only", vec![0.into()]),
            ("HELLO with no version at all", Vec::new()),
        ] {
            let hello = bench.hello("pipeline")?;
            let hello = hello.with("versions", Value::Array(versions));
            let mut peer = bench.upgraded().await?;
            peer.send(hello.frame()).await;
            found.ended(what, CloseCode::VersionUnsupported, &peer.ending().await);
        }
        Ok(found.verdict())
    }
}
