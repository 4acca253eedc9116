//! Body of the fuzz target `discovery`, so that tests can replay a fuzzer's findings. Not a public
//! interface.

use super::{Announcement, Instance, SERVICE_TYPE, StaticPeer};

/// Decodes an announcement: the first line is the full service name, the second the port, each
/// further one a TXT property. Each line is also parsed as a static peer.
///
/// # Panics
/// If a decoded value does not survive encoding.
pub fn announcement(input: &[u8]) {
    let mut lines = input.split(|byte| *byte == b'\n');
    let mut text = || String::from_utf8_lossy(lines.next().unwrap_or_default());
    let name = text();
    let port = text().parse().unwrap_or(7600);
    let properties: Vec<(String, &[u8])> = lines
        .map(|line| {
            let key = line.split(|byte| *byte == b'=').next().unwrap_or_default();
            let value = line.get(key.len() + 1..).unwrap_or_default();
            (String::from_utf8_lossy(key).into_owned(), value)
        })
        .collect();
    let txt = properties.iter().map(|(key, value)| (key.as_str(), *value));
    if let Ok(said) = Announcement::from_heard(&name, port, txt) {
        let txt = said.to_txt().unwrap_or_default();
        let again = Announcement::from_heard(
            &format!("{}.{SERVICE_TYPE}", said.instance()),
            said.port,
            txt.iter().map(|(key, value)| (*key, value.as_bytes())),
        );
        assert_eq!(again, Ok(said));
    }
    if let Some(instance) = Instance::from_full_name(&name) {
        assert_eq!(format!("{instance}.{SERVICE_TYPE}"), name);
    }
    for line in String::from_utf8_lossy(input).lines() {
        if let Ok(peer) = line.parse::<StaticPeer>() {
            assert_eq!(peer.to_string().parse(), Ok(peer));
        }
    }
}

#[cfg(test)]
mod tests {
    proptest::proptest! {
        #[test]
        fn any_bytes_are_survived(input in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            super::announcement(&input);
        }
    }
}
