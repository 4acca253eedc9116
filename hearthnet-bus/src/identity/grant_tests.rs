use proptest::prelude::*;

use super::*;
use crate::testing::{id, key};
use crate::vectors_tests::hex_blocks;

const NOW: u64 = 1_750_000_000;

/// Grant issued and presented by key 1, for node 2.
fn sample() -> Grant {
    Grant {
        issuer: id(1),
        subject: id(1),
        audience: id(2),
        scope: Capability::shard_serve(),
        not_before: NOW,
        expires: NOW + 60,
        id: *b"0123456789abcdef",
    }
}

/// Signs an arbitrary body as key 1, as an attacker with an admitted key can.
fn signed(body: &[u8]) -> Vec<u8> {
    [body, &key(1).sign(Domain::SessionGrant, body)].concat()
}

fn admit(token: &[u8], seen: &mut ReplayCache) -> Result<Grant, GrantError> {
    let expected = Expectation {
        peer: id(1),
        party: id(1),
        audience: id(2),
        scope: &Capability::shard_serve(),
    };
    Grant::admit(token, &expected, |issuer| *issuer == id(1), seen, NOW, 30)
}

/// Checks form, signature and time, but not subject and audience.
fn verify(token: &[u8], now: u64, skew: u64) -> Result<Grant, GrantError> {
    let grant = Grant::verify_signature(token)?;
    grant.check_time(now, skew)?;
    Ok(grant)
}

#[track_caller]
fn assert_malformed(token: &[u8]) {
    let refused = verify(token, NOW, 30);
    let is_malformed = matches!(refused, Err(GrantError::Malformed { .. }));
    assert!(is_malformed, "{refused:?}: {}", hex::encode(token));
}

#[test]
fn the_worked_example_of_the_specification_is_what_this_code_makes() {
    let token = sample().sign(&key(1)).unwrap();
    let spec = include_str!("../../../specs/session-grant.md");
    assert_eq!(hex_blocks(spec).next().unwrap(), hex::encode(token));
    for seed in [1, 2] {
        assert!(
            spec.contains(&id(seed).to_string()),
            "node id of key {seed}"
        );
    }
    assert!(spec.contains(&hex::encode(id(1).as_bytes())));
}

#[test]
fn a_good_token_opens_one_session() {
    let token = sample().sign(&key(1)).unwrap();
    let mut seen = ReplayCache::new(8);
    assert_eq!(admit(&token, &mut seen), Ok(sample()));
    assert_eq!(admit(&token, &mut seen), Err(GrantError::Replayed));
}

#[test]
fn every_refusal_has_its_stable_code_and_leaves_the_cache_alone() {
    use CloseCode::{
        InvalidSignature, TokenAudience, TokenExpired, TokenInvalid, TokenScope, TokenSubject,
        Unauthorized,
    };
    let with = |signer: u8, change: &dyn Fn(&mut Grant)| {
        let mut grant = sample();
        change(&mut grant);
        grant.sign(&key(signer)).unwrap()
    };
    let valid = |from, to| with(1, &|g| (g.not_before, g.expires) = (from, to));
    let other = id(3);
    let mut forged = sample().sign(&key(1)).unwrap();
    *forged.last_mut().unwrap() ^= 1;
    let scope = |g: &mut Grant| g.scope = "other.thing@1.0".parse().unwrap();
    let mut seen = ReplayCache::new(8);
    for (code, token) in [
        (TokenSubject, with(1, &|g| g.subject = other)),
        (TokenAudience, with(1, &|g| g.audience = other)),
        (TokenExpired, valid(NOW - 90, NOW - 30)),
        (TokenExpired, valid(NOW + 31, NOW + 60)),
        (InvalidSignature, forged),
        (Unauthorized, with(3, &|g| g.issuer = other)),
        (TokenScope, with(1, &scope)),
        (TokenInvalid, b"not a token".to_vec()),
        (TokenInvalid, vec![0; MAX_GRANT_BYTES + 1]),
        (TokenInvalid, Vec::new()),
    ] {
        assert_eq!(admit(&token, &mut seen).unwrap_err().code(), code);
    }
    assert_eq!(seen.len(), 0);
}

#[test]
fn the_skew_is_forgiven_to_the_second_and_never_beyond_its_bound() {
    let token = sample().sign(&key(1)).unwrap();
    let at = |now, skew| verify(&token, now, skew).map(|_| ()).map_err(|e| e.code());
    assert_eq!(at(NOW - 30, 30), Ok(()));
    assert_eq!(at(NOW + 89, 30), Ok(()));
    for (now, skew) in [
        (NOW - 31, 30),
        (NOW + 90, 30),
        (NOW + 60 + MAX_CLOCK_SKEW_SECS, u64::MAX),
        (0, u64::MAX),
        (u64::MAX, u64::MAX),
    ] {
        assert_eq!(at(now, skew), Err(CloseCode::TokenExpired));
    }
}

#[test]
fn a_lifetime_that_is_empty_or_too_long_is_neither_signed_nor_accepted() {
    for (not_before, expires) in [
        (NOW, NOW),
        (NOW, NOW - 1),
        (NOW, NOW + 3601),
        (0, u64::MAX),
        (u64::MAX, 0),
    ] {
        let grant = Grant {
            not_before,
            expires,
            ..sample()
        };
        let refused = grant.sign(&key(1));
        assert!(matches!(refused, Err(GrantError::Malformed { .. })));
        assert_malformed(&signed(&Body::of(&grant).encode().unwrap()));
    }
}

#[test]
fn a_grant_is_signed_only_by_its_issuer() {
    assert_eq!(sample().sign(&key(2)), Err(GrantError::NotIssuer));
}

#[test]
fn a_key_of_small_order_is_no_issuer_even_with_a_matching_signature() {
    // For the identity as public key, R = identity and s = 0 satisfies the plain equation.
    let mut body = Body::of(&sample());
    body.iss = ByteArray::new([0; 32]);
    body.iss[0] = 1;
    let mut signature = [0; SIGNATURE_BYTES];
    signature[0] = 1;
    assert_malformed(&[&body.encode().unwrap()[..], &signature].concat());
}

#[test]
fn an_encoding_that_is_not_canonical_is_refused_although_it_is_signed() {
    use ciborium::Value;

    let body = Body::of(&sample()).encode().unwrap();
    let encode = |value: &Value| {
        let mut bytes = Vec::new();
        ciborium::into_writer(value, &mut bytes).unwrap();
        bytes
    };
    let Value::Map(fields) = ciborium::from_reader::<Value, _>(&body[..]).unwrap() else {
        panic!("a grant is a map")
    };
    assert_eq!(encode(&Value::Map(fields.clone())), body);

    let mut swapped = fields.clone();
    swapped.swap(0, 1);
    let mut doubled = fields.clone();
    doubled.push(doubled[0].clone());
    let mut extra = fields.clone();
    extra.push((Value::Text("zz".into()), Value::Null));
    let short = fields[..fields.len() - 1].to_vec();
    let longer_length = [&[0xb8, 8], &body[1..]].concat();
    let indefinite = [&[0xbf], &body[1..], &[0xff]].concat();
    let wide_version = [&body[..3], &[0x18, 1], &body[4..]].concat();
    let tagged = [&[0xd9, 0xd9, 0xf7], &body[..]].concat();
    let tail = [&body[..], &[0]].concat();
    let future = [&body[..3], &[2], &body[4..]].concat();
    for bytes in [
        encode(&Value::Map(swapped)),
        encode(&Value::Map(doubled)),
        encode(&Value::Map(extra)),
        encode(&Value::Map(short)),
        longer_length,
        indefinite,
        wide_version,
        tagged,
        tail,
        future,
    ] {
        assert_malformed(&signed(&bytes));
    }
    assert!(verify(&signed(&body), NOW, 30).is_ok());
}

proptest! {
    #[test]
    fn a_signed_grant_comes_back_the_same(
        issuer: [u8; 32], subject: [u8; 32], audience: [u8; 32], id: [u8; 16],
        start in 0..u64::MAX - 3600, life in 1u64..=3600, name in "[a-z0-9_.]{1,64}", minor: u16,
    ) {
        let issuer = NodeKey::from_secret(&issuer);
        let grant = Grant {
            issuer: issuer.id(),
            subject: NodeKey::from_secret(&subject).id(),
            audience: NodeKey::from_secret(&audience).id(),
            scope: format!("{name}@1.{minor}").parse().unwrap(),
            not_before: start,
            expires: start + life,
            id,
        };
        let token = grant.sign(&issuer).unwrap();
        prop_assert!(token.len() <= MAX_GRANT_BYTES);
        prop_assert_eq!(verify(&token, start, 0).unwrap(), grant);
    }

    #[test]
    fn decoding_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..MAX_GRANT_BYTES + 8)) {
        prop_assert!(verify(&bytes, NOW, 30).is_err());
        let _ = verify(&signed(&bytes), NOW, 30);
    }

    #[test]
    fn a_perturbed_body_never_panics_although_it_is_signed(at: usize, to: u8, cut: usize) {
        let mut body = Body::of(&sample()).encode().unwrap();
        let length = body.len();
        body[at % length] = to;
        let _ = verify(&signed(&body), NOW, 30);
        body.truncate(cut % length);
        prop_assert!(verify(&signed(&body), NOW, 30).is_err());
    }
}

#[test]
fn every_single_bit_flip_of_a_token_is_refused() {
    let token = sample().sign(&key(1)).unwrap();
    for bit in 0..token.len() * 8 {
        let mut flipped = token.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(verify(&flipped, NOW, 30).is_err(), "bit {bit}");
    }
}
