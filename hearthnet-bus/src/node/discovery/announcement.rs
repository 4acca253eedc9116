//! mDNS announcements of nodes: encoding, and checks of received ones.
//!
//! The service type is `_hearthnet._tcp.local.`; the port is that of the node's TLS listener.
//!
//! | TXT key | value |
//! |---|---|
//! | `v` | `1`; anything else is ignored as a whole |
//! | `node` | the node id, `ed25519:` and 43 characters |
//! | `community` | a [`CommunityTag`], 16 hex digits |
//! | `caps` | capability names, separated by commas; at most 16 of at most 64 characters; may be empty or missing |
//!
//! The instance name is `<first 8 bytes of the node's key in hex>-<port>`. So several programs of
//! one node do not collide, a goodbye names its node without a table, and no free text of a
//! stranger is shown or stored.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use crate::NodeId;

/// The DNS-SD service type of a HearthNet node.
pub const SERVICE_TYPE: &str = "_hearthnet._tcp.local.";
/// Names of the TXT record's values, in sending order.
const KEYS: [&str; 4] = ["v", "node", "community", "caps"];
/// The only version of the TXT record.
pub const TXT_VERSION: u8 = 1;
/// Upper bound of capability names in one announcement: far more than a node has.
pub const MAX_CAPS: usize = 16;
/// Upper bound of characters of one capability name.
pub const MAX_CAP_CHARS: usize = 64;

/// Upper bound of bytes of the joined `caps` value: with its key it must fit one TXT string (255
/// bytes).
const MAX_CAPS_BYTES: usize = 240;
/// Upper bound of TXT properties that are read: four in use, and room for later versions.
const MAX_PROPERTIES: usize = 32;
/// Domain separator of the tag's hash.
const TAG_DOMAIN: &[u8] = b"hearthnet community tag v1\0";

/// Short fingerprint of a community's id: the first 8 bytes of a SHA-256 over it.
///
/// Members recognise each other by it. A stranger cannot compute the community's id from it, which
/// stays in invite codes and TLS channels. The tag proves nothing: two communities may share one,
/// and anyone can repeat it.
///
/// Printed and parsed as 16 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommunityTag([u8; 8]);

impl CommunityTag {
    /// The tag of the community whose id is `id` (its 32 raw bytes).
    pub fn of(id: &[u8; 32]) -> Self {
        let digest = Sha256::new()
            .chain_update(TAG_DOMAIN)
            .chain_update(id)
            .finalize();
        let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(digest);
        Self([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for CommunityTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for CommunityTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for CommunityTag {
    type Err = AnnouncementError;

    fn from_str(text: &str) -> Result<Self, AnnouncementError> {
        lower_hex(text)
            .map(Self)
            .ok_or(AnnouncementError::Community)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// Claimed node id; only a TLS handshake proves it.
    pub node: NodeId,
    pub community: CommunityTag,
    /// TCP port of the node's listener, not 0.
    pub port: u16,
    /// Names of offered capabilities, such as `experimental.distributed_llm.shard.serve`.
    pub caps: Vec<String>,
}

/// Why an announcement is not valid, received or to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
#[non_exhaustive]
pub enum AnnouncementError {
    /// `v` is missing, or a version that this program does not know.
    #[error("the announcement is of a version that this program does not know")]
    Version,
    /// `node` is missing or no node id.
    #[error("the announcement does not name a node id")]
    Node,
    /// `community` is missing or not 16 lower-case hex digits.
    #[error("the announcement does not name a community")]
    Community,
    /// `caps` has too many names, or one that is too long or has characters beyond
    /// `a-z`, `0-9`, `.`, `_`, `-` and `@`.
    #[error(
        "the announcement has invalid capability names; at most {MAX_CAPS}, each of at most {MAX_CAP_CHARS} characters"
    )]
    Caps,
    /// The instance name does not follow from the node id and the port.
    #[error("the announcement's name is not that of its node and port")]
    Name,
    /// The port is 0.
    #[error("the announcement has no port")]
    Port,
    /// More properties than any version has.
    #[error("the announcement has more than {MAX_PROPERTIES} properties")]
    Properties,
    /// The addresses cannot belong to this network.
    #[error("the announcement has no address of this network")]
    Addresses,
}

impl Announcement {
    /// The instance name: 16 hex digits, `-`, the port.
    pub fn instance(&self) -> String {
        Instance::of(&self.node, self.port).to_string()
    }

    /// The TXT record, in sending order.
    ///
    /// # Errors
    /// [`AnnouncementError::Port`] and [`AnnouncementError::Caps`], if receivers would refuse it.
    pub(crate) fn to_txt(&self) -> Result<Vec<(&'static str, String)>, AnnouncementError> {
        if self.port == 0 {
            return Err(AnnouncementError::Port);
        }
        let caps = self.caps.join(",");
        if read_caps(&caps)? != self.caps {
            return Err(AnnouncementError::Caps);
        }
        let (version, node) = (TXT_VERSION.to_string(), self.node.to_string());
        let values = [version, node, self.community.to_string(), caps];
        Ok(KEYS.into_iter().zip(values).collect())
    }

    /// Decodes a received announcement from the full service name, the port of its SRV record, and
    /// the TXT properties in order. Names are case-insensitive, the first property of a name
    /// counts, and unknown names are ignored.
    ///
    /// # Errors
    /// [`AnnouncementError`] for the first problem. Values are checked before they are copied.
    pub(crate) fn from_heard<'a>(
        full_name: &str,
        port: u16,
        txt: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<Self, AnnouncementError> {
        let mut values = KEYS.map(|key| (key, None));
        for (nth, (key, value)) in txt.into_iter().enumerate() {
            if nth >= MAX_PROPERTIES {
                return Err(AnnouncementError::Properties);
            }
            let mut known = values.iter_mut();
            if let Some((_, slot)) = known.find(|(known, _)| key.eq_ignore_ascii_case(known)) {
                slot.get_or_insert(value);
            }
        }
        let [v, node, community, caps] = values.map(|(_, value)| value);
        let text = |value: Option<&'a [u8]>| value.and_then(|bytes| str::from_utf8(bytes).ok());
        if text(v).and_then(|v| v.parse().ok()) != Some(TXT_VERSION) {
            return Err(AnnouncementError::Version);
        }
        if port == 0 {
            return Err(AnnouncementError::Port);
        }
        let node: NodeId = text(node)
            .and_then(|node| node.parse().ok())
            .ok_or(AnnouncementError::Node)?;
        if Instance::from_full_name(full_name) != Some(Instance::of(&node, port)) {
            return Err(AnnouncementError::Name);
        }
        let community = text(community)
            .ok_or(AnnouncementError::Community)?
            .parse()?;
        let caps = match caps {
            None => Vec::new(),
            some => read_caps(text(some).ok_or(AnnouncementError::Caps)?)?,
        };
        Ok(Self {
            node,
            community,
            port,
            caps,
        })
    }
}

/// Parsed name of a service instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Instance {
    /// First 8 bytes of the node's key.
    pub prefix: [u8; 8],
    /// Port of the node's listener.
    pub port: u16,
}

impl Instance {
    /// Instance name of a node's listener.
    pub fn of(node: &NodeId, port: u16) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = *node.as_bytes();
        let prefix = [a, b, c, d, e, f, g, h];
        Self { prefix, port }
    }

    /// Parses a full service name, such as `0102030405060708-7071._hearthnet._tcp.local.`; `None`
    /// for any other name.
    pub(crate) fn from_full_name(name: &str) -> Option<Self> {
        let label = name.strip_suffix(SERVICE_TYPE)?.strip_suffix('.')?;
        let (prefix, port) = label.split_once('-')?;
        let this = Self {
            prefix: lower_hex(prefix)?,
            port: port.parse().ok()?,
        };
        // Only the canonical spelling: no sign, no leading zeros.
        (this.to_string() == label).then_some(this)
    }

    /// True if `node` could have this instance name.
    pub(crate) fn may_be(&self, node: &NodeId) -> bool {
        node.as_bytes().starts_with(&self.prefix)
    }
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", hex::encode(self.prefix), self.port)
    }
}

/// Parses exactly 16 lower-case hex digits.
fn lower_hex(text: &str) -> Option<[u8; 8]> {
    let mut bytes = [0; 8];
    hex::decode_to_slice(text, &mut bytes).ok()?;
    // Only the canonical spelling.
    (hex::encode(bytes) == text).then_some(bytes)
}

/// Parses capability names separated by commas.
fn read_caps(text: &str) -> Result<Vec<String>, AnnouncementError> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    if text.len() > MAX_CAPS_BYTES || text.split(',').count() > MAX_CAPS {
        return Err(AnnouncementError::Caps);
    }
    let fits = |name: &str| {
        (1..=MAX_CAP_CHARS).contains(&name.len())
            && name
                .bytes()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' | b'@'))
    };
    text.split(',')
        .map(|name| fits(name).then(|| name.to_owned()))
        .collect::<Option<_>>()
        .ok_or(AnnouncementError::Caps)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::id;

    fn announcement() -> Announcement {
        Announcement {
            node: id(3),
            community: CommunityTag::of(&[9; 32]),
            port: 7071,
            caps: vec!["shard.serve@1.0".into(), "chat".into()],
        }
    }

    fn full_name(announcement: &Announcement) -> String {
        format!("{}.{SERVICE_TYPE}", announcement.instance())
    }

    fn hear(
        announcement: &Announcement,
        txt: &[(&str, String)],
    ) -> Result<Announcement, AnnouncementError> {
        Announcement::from_heard(
            &full_name(announcement),
            announcement.port,
            txt.iter().map(|(key, value)| (*key, value.as_bytes())),
        )
    }

    #[test]
    fn an_announcement_round_trips() {
        let said = announcement();
        assert_eq!(hear(&said, &said.to_txt().unwrap()), Ok(said.clone()));
        let silent = Announcement {
            caps: Vec::new(),
            ..said
        };
        assert_eq!(hear(&silent, &silent.to_txt().unwrap()), Ok(silent));
    }

    #[test]
    fn each_property_is_checked() {
        let said = announcement();
        let with = |at: usize, value: &str| {
            let mut txt = said.to_txt().unwrap();
            txt[at].1 = value.into();
            hear(&said, &txt).unwrap_err()
        };
        for version in ["", "0", "2", "1.0", "01x", " 1"] {
            assert_eq!(with(0, version), AnnouncementError::Version, "{version:?}");
        }
        for node in ["", "ed25519:", "ed25519:AAAA", "\u{202e}"] {
            assert_eq!(with(1, node), AnnouncementError::Node, "{node:?}");
        }
        for tag in [
            "",
            "0123456789ABCDEF",
            "0123456789abcde",
            "0123456789abcdef0",
            "\u{e9}123456789abcd",
        ] {
            assert_eq!(with(2, tag), AnnouncementError::Community, "{tag:?}");
        }
        for caps in [
            ",",
            "a,,b",
            "UPPER",
            "a b",
            "a\u{1b}[2J",
            &"x".repeat(65),
            &["abc"; 17].join(","),
        ] {
            assert_eq!(with(3, caps), AnnouncementError::Caps, "{caps:?}");
        }
    }

    #[test]
    fn a_name_that_is_not_of_its_node_and_port_is_refused() {
        let said = announcement();
        let txt = said.to_txt().unwrap();
        let hear = |name: &str, port| {
            let txt = txt.iter().map(|(key, value)| (*key, value.as_bytes()));
            Announcement::from_heard(name, port, txt).err()
        };
        let good = full_name(&said);
        assert_eq!(hear(&good, said.port), None);
        assert_eq!(hear(&good, said.port + 1), Some(AnnouncementError::Name));
        assert_eq!(hear(&good, 0), Some(AnnouncementError::Port));
        for name in [
            "",
            SERVICE_TYPE,
            "living room._hearthnet._tcp.local.",
            "0102030405060708-7071._hearthnet._tcp.local.",
            &good.to_uppercase(),
            &good.replace("-7071", "-07071"),
            &good.replace("-7071", "-+7071"),
            &good.replace("_tcp", "_udp"),
        ] {
            let fault = hear(name, said.port);
            assert_eq!(fault, Some(AnnouncementError::Name), "{name:?}");
        }
    }

    #[test]
    fn too_many_properties_are_refused_before_they_are_read() {
        let said = announcement();
        let txt: Vec<_> = (0..100).map(|_| ("x", String::new())).collect();
        assert_eq!(hear(&said, &txt), Err(AnnouncementError::Properties));
    }

    #[test]
    fn an_invalid_announcement_is_not_sent() {
        let said = |caps: Vec<String>, port| Announcement {
            caps,
            port,
            ..announcement()
        };
        assert_eq!(said(vec![], 0).to_txt(), Err(AnnouncementError::Port));
        for caps in [&["a,b"][..], &[""], &["Chat"], &["c"; 17]] {
            let caps = caps.iter().map(|&name| name.to_owned()).collect();
            assert_eq!(said(caps, 1).to_txt(), Err(AnnouncementError::Caps));
        }
    }

    #[test]
    fn the_example_of_the_specification_is_what_is_announced() {
        let spec = include_str!("../../../../specs/discovery.md");
        let (_, example) = spec.split_once("## 5. An example").unwrap();
        let lines = example.lines().filter_map(|l| l.strip_prefix("    "));
        let lines: Vec<&str> = lines.collect();
        let key = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
        let node: NodeId = key.parse().unwrap();
        let said = Announcement {
            node,
            community: CommunityTag::of(node.as_bytes()),
            port: 7600,
            caps: vec!["experimental.distributed_llm.shard.serve@1.0".into()],
        };
        let txt = said.to_txt().unwrap().into_iter();
        let mut wanted = vec![full_name(&said)];
        wanted.extend(txt.map(|(key, value)| format!("{key}={value}")));
        assert_eq!(lines, wanted);
    }

    #[test]
    fn a_tag_reads_back_and_differs_between_communities() {
        let tag = CommunityTag::of(&[1; 32]);
        assert_eq!(tag.to_string().parse(), Ok(tag));
        assert_ne!(tag, CommunityTag::of(&[2; 32]));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(
            name in "\\PC{0,80}",
            port: u16,
            txt in proptest::collection::vec(("v|node|community|caps|\\PC{0,8}", proptest::collection::vec(any::<u8>(), 0..80)), 0..40),
        ) {
            let _ = Announcement::from_heard(&name, port, txt.iter().map(|(key, value)| (key.as_str(), value.as_slice())));
            let _ = Instance::from_full_name(&name);
        }

        #[test]
        fn instance_names_read_back(prefix: [u8; 8], port: u16) {
            let instance = Instance { prefix, port };
            prop_assert_eq!(Instance::from_full_name(&format!("{instance}.{SERVICE_TYPE}")), Some(instance));
        }
    }
}
