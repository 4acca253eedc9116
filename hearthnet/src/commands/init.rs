//! `hearthnet init`: makes this machine a node. A second run changes nothing and reports that.

use std::fs;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};

use hearthnet_bus::NodeKey;
use hearthnet_platform::files::{close_folder_to_others, foreign_owner, open_to_others};
use hearthnet_platform::whole_file::{self, Access};

use crate::cli::args::{Global, InitArgs};
use crate::cli::{Failure, Kind, answer, failure, note, print, print_json};
use crate::config::{Loaded, default_path, starter};
use crate::home::NODE_KEY;

/// Files that make a machine a node, and whether each was there before.
pub(super) struct Made {
    data: (PathBuf, &'static str),
    key: NodeKey,
    key_file: (PathBuf, &'static str),
    config: (PathBuf, &'static str),
}

/// Makes the data directory, the key and the configuration, as far as they are missing. `research`
/// says whether a new configuration switches distributed inference on.
pub(super) fn make(
    global: &Global,
    research: impl FnOnce() -> Result<bool, Failure>,
    name: Option<&str>,
    memory_percent: Option<u64>,
) -> Result<Made, Failure> {
    let data = global.dir()?;
    let data_state = private_dir(&data)?;
    let key_file = data.join(NODE_KEY);
    let key_state = match fs::symlink_metadata(&key_file) {
        Ok(_) => "exists",
        Err(_) => "made",
    };
    let key = global.node_key()?;
    let config = global.config.clone().or_else(default_path);
    let config = config.ok_or_else(|| {
        let why = "there is no home directory for the configuration";
        Failure::new(Kind::Host, why).hint("name the file with --config")
    })?;
    let config_state = match config.exists() {
        true => "exists",
        false => {
            write_config(&config, &text(research()?, name, memory_percent))?;
            "written"
        }
    };
    Ok(Made {
        data: (data, data_state),
        key,
        key_file: (key_file, key_state),
        config: (config, config_state),
    })
}

pub(crate) fn run(args: &InitArgs, global: &Global) -> Result<(), Failure> {
    let research = || match args.research {
        true => Ok(true),
        false => agrees_to_research(args.json, false),
    };
    let Made {
        data: (data, data_state),
        key,
        key_file: (key_file, key_state),
        config: (config, config_state),
    } = make(global, research, args.name.as_deref(), None)?;
    let loaded = Loaded::load(Some(&config), &global.set)?;
    let research = loaded.config.policy.research.enable;
    if args.json {
        return print_json(&serde_json::json!({
            "node_id": key.id().to_string(),
            "short": key.id().short(),
            "data_dir": { "path": data.to_string_lossy(), "state": data_state },
            "node_key": { "path": key_file.to_string_lossy(), "state": key_state },
            "config": { "path": config.to_string_lossy(), "state": config_state },
            "research": research,
        }));
    }
    print(format!(
        "node id        {}\n\
             short          {}\n\
             data           {} ({data_state})\n\
             node key       {} ({key_state}; only you can read it)\n\
             configuration  {} ({config_state})\n\
             research       {}\n",
        key.id(),
        key.id().short(),
        data.display(),
        key_file.display(),
        config.display(),
        if research {
            "on: this node takes part in distributed inference"
        } else {
            "off: policy.research.enable = true switches distributed inference on"
        },
    ))?;
    let config = config.display();
    if config_state == "exists" && args.research && !research {
        note(format!(
            "the configuration was left as it is; set enable = true under [policy.research] in {config}"
        ));
    }
    if config_state == "exists" && args.name.is_some() {
        note(format!(
            "the configuration was left as it is; set name under [node] in {config}"
        ));
    }
    note("next: `hearthnet community create NAME`, or `hearthnet community join CODE`");
    Ok(())
}

/// Creates the data directory, accessible to this user only. Restricts the permissions of an
/// existing one if it belongs to the user and is empty or holds a node.
fn private_dir(path: &Path) -> Result<&'static str, Failure> {
    let fail = |what: &str, e: io::Error| {
        Failure::file(&format!("{what} the data directory"), path, e)
            .hint("choose another one with --data-dir")
    };
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            whole_file::make_folder(path, Access::Owner).map_err(|e| fail("make", e))?;
            return Ok("made");
        }
        Err(e) => return Err(fail("look into", e)),
    };
    let refuse = |why: String| {
        Err(
            failure!(Host, "the data directory {} {why}", path.display())
                .hint("choose another one with --data-dir"),
        )
    };
    if !meta.is_dir() {
        return refuse("is not a directory".into());
    }
    if foreign_owner(&meta).is_some() {
        return refuse("belongs to another user".into());
    }
    let Some(mode) = open_to_others(&meta) else {
        return Ok("exists");
    };
    let mut entries = fs::read_dir(path).map_err(|e| fail("look into", e))?;
    let ours = path.join(NODE_KEY).exists() || entries.next().is_none();
    if !ours {
        return refuse(format!(
            "is open to other users (mode {mode:03o}) and holds other files"
        ));
    }
    close_folder_to_others(path).map_err(|e| fail("close", e))?;
    Ok("exists; closed to other users")
}

/// Asks for consent on a terminal. `unasked` is the result without a terminal, and for an empty
/// answer.
pub(crate) fn agrees_to_research(as_json: bool, unasked: bool) -> Result<bool, Failure> {
    if as_json || !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Ok(unasked);
    }
    note(
        "Distributed inference is a research module: this machine may hold layers of a model for\nyour community, and use layers of other machines. A machine that computes for you receives\nnumbers from which your words can be guessed in part, so use it among people whom you trust.",
    );
    let choice = if unasked { "[Y/n]" } else { "[y/N]" };
    Ok(answer("Switch it on?", choice)?.unwrap_or(unasked))
}

/// Writes an initial configuration, unless the file exists.
pub(crate) fn write_new(path: &Path, research: bool, name: Option<&str>) -> Result<(), Failure> {
    write_config(path, &text(research, name, None))
}

/// Text of the initial configuration, with the node's name and the share of the memory if they were
/// given.
fn text(research: bool, name: Option<&str>, memory_percent: Option<u64>) -> String {
    // A TOML basic string, with its escapes.
    let name = name.map(|name| format!("name = {}", toml::Value::from(name)));
    let memory = memory_percent.map(|percent| format!("memory_percent = {percent}"));
    let set = [("#name = \"\"", name), ("#memory_percent = 50", memory)];
    let set = set.into_iter().filter_map(|(key, line)| Some((key, line?)));
    set.fold(starter(research), |text, (key, line)| {
        text.replacen(key, &line, 1)
    })
}

/// Writes the file atomically and durably; never replaces an existing file.
fn write_config(path: &Path, text: &str) -> Result<(), Failure> {
    let fail = |e: io::Error| {
        failure!(Config, "cannot write {}: {e}", path.display())
            .hint("choose another file with --config")
    };
    // Validate first: a name may be too long.
    crate::config::check(path, text)?;
    whole_file::make_folder(whole_file::folder_of(path), Access::Readable).map_err(fail)?;
    let written = whole_file::create(path, text.as_bytes(), Access::Readable);
    match written {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.exists() => Ok(()),
        other => other.map_err(fail),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    #[test]
    fn a_directory_is_made_private_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        assert_eq!(private_dir(&path).unwrap(), "made");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        assert_eq!(private_dir(&path).unwrap(), "exists");
    }

    #[test]
    fn only_our_own_open_directory_is_made_private() {
        let dir = tempfile::tempdir().unwrap();
        let open = |name: &str, file: Option<&str>| {
            let path = dir.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            if let Some(file) = file {
                fs::write(path.join(file), "").unwrap();
            }
            path
        };
        for (name, file) in [("empty", None), ("ours", Some("node.key"))] {
            let path = open(name, file);
            private_dir(&path).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        }
        let other = open("other", Some("letters.txt"));
        assert_eq!(private_dir(&other).unwrap_err().kind, Kind::Host);
        assert_eq!(fs::metadata(&other).unwrap().mode() & 0o777, 0o755);
    }

    #[test]
    fn a_name_is_written_so_that_it_reads_back() {
        for name in ["kitchen", "O'Brien \"the\" \\ Küche"] {
            let table: toml::Table = text(true, Some(name), None).parse().unwrap();
            assert_eq!(table["node"]["name"].as_str(), Some(name));
        }
    }

    #[test]
    fn a_configuration_that_exists_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/c.toml");
        write_config(&path, "[engine]\n").unwrap();
        write_config(&path, "[node]\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "[engine]\n");
        let long = text(false, Some(&"x".repeat(65)), None);
        let other = dir.path().join("other.toml");
        assert_eq!(write_config(&other, &long).unwrap_err().kind, Kind::Config);
        assert!(!other.exists());
        assert_eq!(fs::read_dir(dir.path().join("new")).unwrap().count(), 1);
    }
}
