//! Ed25519 has several verification equations, and some implementations accept more than the strict
//! one. A respelled signature would then be a second token, and a small-order key would validate
//! any signature. A certificate is public, so showing one proves nothing.

use super::prelude::*;
use crate::bench::token;

/// Group order, little-endian: 2^252 + 27742317777372353535851937790883648493.
const ORDER: [u8; 32] = [
    0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9, 0xde, 0x14,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10,
];

/// Encodings of points of small order: the neutral element, order 2, order 4 twice.
const SMALL: [[u8; 32]; 4] = {
    let mut points = [[0; 32]; 4];
    points[0][0] = 1;
    points[1] = [0xff; 32];
    points[1][0] = 0xec;
    points[1][31] = 0x7f;
    points[3][31] = 0x80;
    points
};

/// Bytes of the signature at the end of a token.
const SIGNATURE: usize = 64;

/// The same signature with its scalar `s` encoded as `s + L`.
pub(super) fn respelled(mut token: Vec<u8>) -> Vec<u8> {
    let scalar = token.len().saturating_sub(32);
    let mut carry = 0;
    for (byte, order) in token.iter_mut().skip(scalar).zip(ORDER) {
        let sum = u16::from(*byte) + u16::from(order) + carry;
        *byte = sum as u8;
        carry = sum >> 8;
    }
    token
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let attacker = &bench.attacker;
    let token = || token(attacker, bench.target.node);
    let code = CloseCode::InvalidSignature;

    let ending = bench.show(respelled(token()?)).await?;
    found.ended("a scalar beyond the group's order", code, &ending);
    let length = token()?.len();
    for (what, at) in [
        ("a flipped bit in the scalar", length - 1),
        ("a flipped bit in the point", length - SIGNATURE),
        // The id is preceded by the map's head, `v` and its number, `id` and its head.
        ("a flipped bit in the signed part", 12),
    ] {
        let mut token = token()?;
        if let Some(byte) = token.get_mut(at) {
            *byte ^= 1;
        }
        let ending = bench.show(token).await?;
        found.ended(what, code, &ending);
    }

    // With a key of small order, R = the neutral element and s = 0 validate for every message.
    for point in SMALL {
        let grant = bench.grant(attacker)?;
        let mut token = cbor(&[
            ("v", 1.into()),
            ("id", bytes(&grant.id)),
            ("aud", bytes(grant.audience.as_bytes())),
            ("exp", grant.expires.into()),
            ("iss", bytes(&point)),
            ("nbf", grant.not_before.into()),
            ("sub", bytes(grant.subject.as_bytes())),
            ("scope", grant.scope.to_string().into()),
        ]);
        token.push(1);
        token.resize(token.len() + SIGNATURE - 1, 0);
        let ending = bench.show(token).await?;
        // An unusable key makes the token invalid.
        found.ended("an issuer of small order", CloseCode::TokenInvalid, &ending);
    }

    let shown = Credentials::of(&bench.honest_key.secret()).certificate;
    let impostor = Credentials {
        certificate: shown,
        ..Credentials::of(&attacker.secret())
    };
    let answer = bench.secured_with(&impostor).await?.upgrade().await?;
    let held = !answer.starts_with("HTTP/");
    let what = "another node's certificate";
    found.check(what, "no session", answer, held);
    Ok(())
}
