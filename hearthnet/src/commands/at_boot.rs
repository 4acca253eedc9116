//! `hearthnet up --at-boot`: lets the user's systemd start this node at every boot. Writes
//! `config/hearthnet.service` with this program and its options as a unit of the user, and enables it.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};

use crate::cli::args::UpArgs;
use crate::cli::{Failure, failure, note};
use crate::config::{Context, xdg};

/// The unit; its comments say how to install it by hand.
const UNIT: &str = include_str!("../../../config/hearthnet.service");
const NAME: &str = "hearthnet.service";
/// Line of the unit that names the program.
const PROGRAM: &str = "ExecStart=";
/// Longest unit of a user that is compared.
const MAX_BYTES: u64 = 64 << 10;
/// Exists while systemd runs the machine.
const SYSTEMD: &str = "/run/systemd/system";

/// Returns true if systemd is the init system of this machine.
pub(super) fn is_possible() -> bool {
    Path::new(SYSTEMD).is_dir()
}

/// Enables the unit. The node runs now in any case, so a failure is only reported.
pub(super) fn enable(args: &UpArgs, cx: &Context) {
    match unit_of(args, cx).and_then(|unit| install(&unit)) {
        Ok(()) => note(format!(
            "systemd starts this node at every boot; `systemctl --user disable {NAME}` ends that"
        )),
        Err(why) => note(format!(
            "this node does not start at boot: {}",
            why.with_hint()
        )),
    }
}

/// Text of the unit for this program with these options.
fn unit_of(args: &UpArgs, cx: &Context) -> Result<String, Failure> {
    let program = std::env::current_exe().map_err(Failure::internal)?;
    let mut words = vec![program.into_os_string()];
    words.extend(cx.global.to_args());
    words.extend(["up", "--no-open"].map(OsString::from));
    for (name, value) in [("--listen", &args.listen), ("--http", &args.http)] {
        words.extend(
            value
                .iter()
                .flat_map(|value| [name, value.as_str()])
                .map(OsString::from),
        );
    }
    if args.phone {
        words.push("--phone".into());
    }
    let words: Option<Vec<String>> = words
        .iter()
        .map(|word| Some(quoted(word.to_str()?)))
        .collect();
    let words = words.ok_or_else(|| {
        failure!(Config, "a path among its options is not valid UTF-8")
            .hint("write a unit by hand: config/hearthnet.service says how")
    })?;
    let lines = UNIT.lines().map(|line| match line.starts_with(PROGRAM) {
        true => format!("{PROGRAM}{}\n", words.join(" ")),
        false => format!("{line}\n"),
    });
    // The comments at its beginning are about the file of the repository.
    let body: String = lines.skip_while(|line| line.starts_with('#')).collect();
    Ok(format!(
        "# Written by `hearthnet up --at-boot`.\n{}",
        body.trim_start_matches('\n')
    ))
}

/// A word of a command line of systemd, in which `%` and `$` begin a replacement.
fn quoted(word: &str) -> String {
    let mut out = String::from("\"");
    for letter in word.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            '%' | '$' => out.extend([letter, letter]),
            '\n' => out.push_str("\\n"),
            _ => out.push(letter),
        }
    }
    out.push('"');
    out
}

fn install(unit: &str) -> Result<(), Failure> {
    let path = unit_path().ok_or_else(|| failure!(Config, "this user has no home directory"))?;
    let known = regular_file::read(&path, MAX_BYTES).ok();
    match known {
        Some(known) if known == unit.as_bytes() => {}
        Some(_) => note(format!("{} is kept as it is", path.display())),
        None => write(&path, unit)?,
    }
    run("systemctl", &["--user", "daemon-reload"])?;
    run("systemctl", &["--user", "enable", NAME])?;
    // Without it, systemd starts the units of a user at the login.
    run("loginctl", &["enable-linger"])
        .map_err(|why| failure!(Host, "{why}").hint("it starts when you log in"))
}

fn unit_path() -> Option<PathBuf> {
    let dir = xdg("XDG_CONFIG_HOME", ".config")?;
    Some(dir.join("systemd/user").join(NAME))
}

fn write(path: &Path, unit: &str) -> Result<(), Failure> {
    let failed = |error| Failure::file("write", path, error);
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(failed)?;
    }
    whole_file::create(path, unit.as_bytes(), Access::Umask).map_err(failed)
}

fn run(program: &str, args: &[&str]) -> Result<(), Failure> {
    let command = format!("`{program} {}`", args.join(" "));
    let ran = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output();
    let output = match ran {
        Ok(output) => output,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(failure!(Host, "there is no {program} on this machine")
                .hint("let the system start `hearthnet up --no-open` in another way"));
        }
        Err(error) => return Err(failure!(Host, "{command}: {error}")),
    };
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().next().unwrap_or("it failed").to_owned();
    Err(failure!(Host, "{command}: {said}")
        .hint("run it yourself in a session of this user, then `hearthnet up --at-boot` again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_unit_are_taken_literally_by_systemd() {
        assert_eq!(quoted("/home/a b/h"), "\"/home/a b/h\"");
        assert_eq!(quoted(r#"50%$"\"#), r#""50%%$$\"\\""#);
    }

    #[test]
    fn the_unit_of_the_repository_has_one_line_that_names_the_program() {
        let lines = UNIT.lines().filter(|line| line.starts_with(PROGRAM));
        assert_eq!(lines.count(), 1);
    }
}
