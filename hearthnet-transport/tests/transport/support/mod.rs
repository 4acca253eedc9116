//! Test messages, and access to received ones.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fmt::Debug;

use bytes::Bytes;
use hearthnet_transport::session::{Event, Session};
use hearthnet_transport::{
    CloseCode, Connection, DType, Dims, Message, SessionClosed, Step, StreamOpen, StreamOpened,
    Tensor, Want,
};

/// Bytes that zstd cannot shrink.
pub(crate) fn noise(len: usize) -> Bytes {
    let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ len as u64;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    Bytes::from(out)
}

pub(crate) fn tensor(dims: &[u32], dtype: DType, data: Bytes) -> Tensor {
    Tensor {
        dtype,
        dims: Dims::new(dims).unwrap(),
        data,
    }
}

/// A step of fp16 rows of width 576.
pub(crate) fn step(stream: u32, epoch: u32, position: u32, rows: u32, data: Bytes) -> Step {
    Step {
        stream,
        epoch,
        position,
        rows,
        width: 576,
        dtype: DType::F16,
        want: Want::All,
        data,
    }
}

/// A step of one row.
pub(crate) fn row(stream: u32, epoch: u32, position: u32) -> Step {
    step(stream, epoch, position, 1, noise(1152))
}

/// Answer to a step, with the rows that it wants.
pub(crate) fn answer(step: &Step) -> Message {
    Message::StepResult(step.echo())
}

/// Receives a message, which must be a step.
pub(crate) async fn next_step(host: &mut Connection) -> Step {
    match host.recv().await.unwrap() {
        Message::Step(step) => step,
        other => panic!("{other:?}"),
    }
}

/// Answers every step with the rows that it wants, opens streams and echoes tensors, until the
/// session ends.
pub(crate) async fn serve_echo(mut host: Connection) -> SessionClosed {
    loop {
        let back = match host.recv().await {
            Ok(Message::Step(step)) => answer(&step),
            Ok(Message::StreamOpen(StreamOpen { stream, epoch, .. })) => {
                Message::StreamOpened(StreamOpened { stream, epoch })
            }
            Ok(Message::Tensor(tensor)) => Message::Tensor(tensor),
            Ok(_) => continue,
            Err(closed) => return closed,
        };
        let _ = host.sender().send(back).await;
    }
}

pub(crate) fn open_stream(stream: u32, epoch: u32) -> StreamOpen {
    StreamOpen {
        stream,
        epoch,
        weights: [0x77; 32],
        lo: 0,
        hi: 14,
        max_positions: 512,
        fork: None,
    }
}

/// Asserts that a connection has ended with `code`, closed by this side or by the peer.
#[track_caller]
pub(crate) fn ended<T: Debug>(received: Result<T, SessionClosed>, code: CloseCode, by_us: bool) {
    let closed = received.unwrap_err();
    assert_eq!((closed.code, closed.by_us), (code, by_us));
}

/// Sends a message, which must be accepted.
#[track_caller]
pub(crate) fn say(session: &mut Session, message: &Message) {
    session.send_message(message).unwrap();
}

/// Takes every message that waits for the application.
pub(crate) fn messages(session: &mut Session) -> Vec<Message> {
    std::iter::from_fn(|| session.poll_event())
        .map(|event| match event {
            Event::Message(message) => message,
            other => panic!("{other:?}"),
        })
        .collect()
}
