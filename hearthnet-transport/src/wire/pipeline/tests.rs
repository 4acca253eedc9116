//! Bodies of the pipeline's frames: layout and round trips.

use super::*;
use crate::message::Fork;
use crate::wire::{HEADER_BYTES, Header};

/// A step whose rows are elsewhere.
fn step() -> Step {
    Step {
        stream: 0x0101_0101,
        epoch: 0x0202_0202,
        position: 0x0303_0303,
        rows: 2,
        width: 3,
        dtype: DType::F16,
        want: Want::Last,
        data: Bytes::new(),
    }
}

fn result() -> StepResult {
    StepResult {
        rows: 2,
        compute_us: 0x0505_0505,
        queue_us: 0x0606_0606,
        ..step().echo()
    }
}

fn rows_bytes(message: &Message, place: Place<'_>) -> Vec<u8> {
    rows_frame(message, place).unwrap().into_bytes(1)
}

/// Asserts that a message survives a round trip.
fn survives(kind: FrameType, message: Message) {
    let body = frame(&message)
        .unwrap()
        .into_bytes(1)
        .split_off(HEADER_BYTES);
    assert_eq!(read(kind, &body).unwrap(), message);
}

#[test]
fn describe_is_empty_and_a_descriptor_travels_as_it_is() {
    let message = frame(&Message::Describe).unwrap().into_bytes(1);
    assert_eq!(message, [1, 0x17, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(read(FrameType::Describe, &[0]).is_err());

    let descriptor = |bytes: &[u8]| Message::Descriptor(Bytes::copy_from_slice(bytes));
    let message = frame(&descriptor(&[7, 8, 9])).unwrap().into_bytes(1);
    let mut expected = vec![1, 0x18, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0];
    expected.extend_from_slice(&[7, 8, 9]);
    assert_eq!(message, expected);
    let read = |body: &[u8]| read(FrameType::Descriptor, body);
    assert_eq!(read(&[7, 8, 9]).unwrap(), descriptor(&[7, 8, 9]));
    for length in [0, CONTROL_MESSAGE_BYTES - HEADER_BYTES + 1] {
        assert!(frame(&descriptor(&vec![0; length])).is_err(), "{length}");
        assert!(read(&vec![0; length]).is_err(), "{length}");
    }
}

#[test]
fn a_hosts_leave_carries_how_long_it_goes_on() {
    for within_ms in [0, 10_000, u32::MAX] {
        survives(FrameType::Leaving, Message::Leaving { within_ms });
    }
    // Beyond the field's range, negative, absent, a duplicate key, an unknown key.
    let beyond = b"\xa1\x69within_ms\x1b\x00\x00\x00\x01\x00\x00\x00\x00";
    let negative = b"\xa1\x69within_ms\x20";
    let twice = b"\xa2\x69within_ms\x00\x69within_ms\x00";
    let other = b"\xa2\x69within_ms\x00\x61x\x00";
    for body in [&beyond[..], negative, b"\xa0", twice, other, b""] {
        let violation = read(FrameType::Leaving, body).unwrap_err();
        assert_eq!(violation.code, CloseCode::BodyMalformed, "{body:x?}");
    }
}

#[test]
fn a_receipt_has_a_claim_a_chain_and_a_signature_of_their_lengths() {
    let receipt = Receipt {
        stream: 1,
        epoch: 2,
        claims: std::num::NonZeroU32::MAX,
        chain: [3; 32],
        signature: [4; 64],
    };
    survives(FrameType::Receipt, Message::Receipt(receipt));
    let body = frame(&Message::Receipt(receipt)).unwrap().into_bytes(1);
    let body = &body[HEADER_BYTES..];
    let at = |key: &[u8]| body.windows(key.len()).position(|w| w == key).unwrap() + key.len();
    // No claim, a shorter chain, a longer signature.
    let (claims, chain, signature) = (at(b"claims"), at(b"chain"), at(b"signature"));
    let mut none = body.to_vec();
    none.splice(claims..claims + 5, [0]);
    let mut short = body.to_vec();
    short.splice(chain..chain + 3, [0x58, 31]);
    let mut long = body.to_vec();
    long.splice(signature..signature + 2, [0x58, 65, 0]);
    for body in [none, short, long, b"\xa0".to_vec()] {
        let violation = read(FrameType::Receipt, &body).unwrap_err();
        assert_eq!(violation.code, CloseCode::BodyMalformed);
    }
}

#[test]
fn step_and_result_have_the_documented_layout() {
    let rows = [0xee; 12];
    let message = rows_bytes(&Message::Step(step()), Place::Inline(&rows));
    let mut expected = vec![1, 0x13, 0, 0, 0, 0, 0, 1, 0, 0, 0, 44, 0, 0, 0, 0];
    expected.extend_from_slice(&[1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 0, 0, 0, 2, 0, 0, 0, 3]);
    expected.extend_from_slice(&[1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend_from_slice(&rows);
    assert_eq!(message, expected);
    assert_eq!(message.len(), HEADER_BYTES + 32 + 12);

    let message = rows_bytes(&Message::StepResult(result()), Place::Tensor(0x0708));
    let mut expected = vec![1, 0x14, 0, 0, 0, 0, 0, 1, 0, 0, 0, 40, 0, 0, 0, 0];
    expected.extend_from_slice(&[1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 0, 0, 0, 2, 0, 0, 0, 3]);
    expected.extend_from_slice(&[1, 0, 1, 0, 7, 8, 0, 0, 5, 5, 5, 5, 6, 6, 6, 6, 0, 0, 0, 0]);
    assert_eq!(message, expected);
    assert_eq!(message.len(), HEADER_BYTES + RESULT_HEAD_BYTES);
}

#[test]
fn step_and_result_survive_a_round_trip() {
    let empty = StepResult {
        rows: 0,
        ..result()
    };
    let (step, result) = (Message::Step(step()), Message::StepResult(result()));
    for (head, place) in [
        (&step, Place::Inline(&[5; 12][..])),
        (&step, Place::Tensor(9)),
        (&result, Place::Inline(&[5; 12])),
        (&result, Place::Tensor(9)),
        // A result may be empty.
        (&Message::StepResult(empty), Place::Inline(&[])),
    ] {
        let message = rows_bytes(head, place);
        let (header, body) = Header::decode(&message).unwrap();
        let (read, at) = read_rows(header.kind, body).unwrap();
        assert_eq!((&read, at), (head, place));
    }
}

#[test]
fn rows_that_disagree_with_the_shape_are_refused() {
    let with = |rows, width, dtype| {
        Message::Step(Step {
            rows,
            width,
            dtype,
            ..step()
        })
    };
    let nothing = StepResult {
        rows: 0,
        width: 0,
        ..result()
    };
    for (head, bytes) in [
        (Message::Step(step()), 11),
        (Message::Step(step()), 13),
        (with(0, 3, DType::F16), 0),
        (with(2, 0, DType::F16), 0),
        (Message::StepResult(nothing), 0),
        (with(u32::MAX, u32::MAX, DType::F32), 12),
    ] {
        let message = rows_bytes(&head, Place::Inline(&vec![0; bytes]));
        let (header, body) = Header::decode(&message).unwrap();
        let code = read_rows(header.kind, body).unwrap_err().code;
        assert_eq!(code, CloseCode::TensorShape, "{head:?}");
    }
}

#[test]
fn the_other_bodies_survive_a_round_trip() {
    let open = StreamOpen {
        stream: u32::MAX,
        epoch: 1,
        weights: [0xaa; 32],
        lo: 0,
        hi: 29,
        max_positions: 2048,
        fork: None,
    };
    survives(FrameType::StreamOpen, Message::StreamOpen(open.clone()));
    let fork = Some(Fork {
        stream: 3,
        epoch: u32::MAX,
        position: 7,
    });
    let forked = StreamOpen {
        fork,
        ..open.clone()
    };
    survives(FrameType::StreamOpen, Message::StreamOpen(forked));
    let backwards = frame(&Message::StreamOpen(StreamOpen { lo: 30, ..open })).unwrap();
    let backwards = backwards.into_bytes(1).split_off(HEADER_BYTES);
    assert!(read(FrameType::StreamOpen, &backwards).is_err());
    let (stream, epoch) = (1, 2);
    let opened = StreamOpened { stream, epoch };
    survives(FrameType::StreamOpened, Message::StreamOpened(opened));
    let close = StreamClose { stream, epoch };
    survives(FrameType::StreamClose, Message::StreamClose(close));
    for answer in [false, true] {
        let cut = Truncate {
            stream,
            epoch,
            position: 3,
            answer,
        };
        survives(FrameType::Truncate, Message::Truncate(cut));
    }
    let kept = Truncated {
        stream,
        epoch,
        position: 0,
    };
    survives(FrameType::Truncated, Message::Truncated(kept));
    for position in [None, Some(7)] {
        let error = StreamError {
            stream,
            epoch,
            position,
            code: "position_gap".into(),
            message: "the stream has 5 positions".into(),
        };
        survives(FrameType::StreamError, Message::StreamError(error));
    }
}
