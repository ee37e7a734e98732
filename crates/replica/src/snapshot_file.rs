//! Files of a snapshot: replaced as a whole, readable by their owner only, because they contain the secret that API keys
//! are hashed with, and read within a bound.

use crate::dump::{DumpHeader, DumpReader};
use ring::digest::{SHA256, digest};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{BufWriter, Error, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Writes a new file and renames it over the old one: a reader finds either of them, complete.
///
/// # Errors
/// Those of the file system, or of `write`; the old file stays.
pub fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".{}.new", std::process::id()));
    let new = PathBuf::from(new);
    let _ = std::fs::remove_file(&new);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    let mut file = BufWriter::with_capacity(1 << 16, file);
    let written = write(&mut file).and_then(|()| file.flush()).and_then(|()| file.get_ref().sync_all());
    if let Err(error) = written {
        let _ = std::fs::remove_file(&new);
        return Err(error);
    }
    std::fs::rename(&new, path).inspect_err(|_| {
        let _ = std::fs::remove_file(&new);
    })
}

/// Opens a file that no other user can have written: a regular file of the effective user, which neither its group nor others
/// may write, and no symbolic link. Never waits.
///
/// # Errors
/// Those of the file system; `PermissionDenied` or `InvalidData` if it is another kind of file.
pub fn open_private(path: &Path) -> std::io::Result<File> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => Error::new(ErrorKind::InvalidData, "a symbolic link; name the file itself"),
        _ => error,
    })?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(Error::new(ErrorKind::InvalidData, "not a regular file"));
    }
    let denied = |reason: &str| Err(Error::new(ErrorKind::PermissionDenied, reason));
    if found.uid() != rustix::process::geteuid().as_raw() {
        return denied("owned by another user than this process has");
    }
    if found.mode() & 0o022 != 0 {
        return denied("writable by its group or others; use `chmod 600`");
    }
    Ok(file)
}

/// Writes bytes as a whole, with their SHA-256 in a line after them.
///
/// # Errors
/// As for [`replace`].
pub fn replace_sealed(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    replace(path, |file| {
        file.write_all(bytes)?;
        writeln!(file, "\n{}", checksum(bytes))
    })
}

/// Reads at most `max` bytes that [`replace_sealed`] wrote.
///
/// # Errors
/// As for [`open_private`]; `InvalidData` if the file is larger, or is not what was written.
pub fn read_sealed(path: &Path, max: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = read_bounded(path, max.saturating_add(SEAL_BYTES as u64))?;
    let damaged = || Error::new(ErrorKind::InvalidData, "damaged: its checksum is missing or wrong");
    let length = bytes.len().checked_sub(SEAL_BYTES).ok_or_else(damaged)?;
    if bytes[length..] != *format!("\n{}\n", checksum(&bytes[..length])).as_bytes() {
        return Err(damaged());
    }
    bytes.truncate(length);
    Ok(bytes)
}

/// Length of a checksum and the ends of the lines before and after it.
const SEAL_BYTES: usize = 64 + 2;

fn checksum(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read_bounded(path: &Path, max: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_private(path)?.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        return Err(Error::new(ErrorKind::InvalidData, format!("larger than {max} bytes")));
    }
    Ok(bytes)
}

/// Reads a dump of this installation from a file. Returns its header.
///
/// # Errors
/// The file cannot be read, or the dump cannot be used.
pub fn read_dump(
    mut file: impl Read,
    mut reader: DumpReader,
    installation: &str,
) -> std::io::Result<DumpHeader> {
    let mut piece = vec![0; 1 << 16];
    loop {
        let read = file.read(&mut piece)?;
        if read == 0 {
            return reader.finish(installation).map_err(std::io::Error::other);
        }
        reader.push(&piece[..read]).map_err(std::io::Error::other)?;
    }
}

/// Returns the path of the quotas file that belongs to a state file.
#[must_use]
pub fn quotas_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".quotas");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_what_was_written_by_this_user_is_read() {
        let folder = std::env::temp_dir().join(format!("tollgate-sealed-{}", std::process::id()));
        let path = folder.join("new").join("file");
        replace_sealed(&path, b"{\"limit\": 100}").expect("written");
        assert_eq!(std::fs::metadata(folder.join("new")).expect("a folder").mode() & 0o777, 0o700);
        assert_eq!(read_sealed(&path, 14).expect("read"), b"{\"limit\": 100}");
        assert!(read_sealed(&path, 13).is_err(), "larger than allowed");

        // Every byte counts.
        let whole = std::fs::read(&path).expect("a file");
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            std::fs::write(&path, bytes).expect("written");
            assert!(read_sealed(&path, 1_000).is_err(), "byte {at}");
        }
        for length in [0, 10, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).expect("written");
            assert!(read_sealed(&path, 1_000).is_err(), "{length} bytes");
        }
        std::fs::write(&path, &whole).expect("written");

        let link = folder.join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        let error = read_sealed(&link, 1_000).expect_err("a link");
        assert!(error.to_string().contains("symbolic link"), "{error}");
        assert!(open_private(&folder).is_err(), "a folder");
        let pipe = folder.join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
        assert!(made.success());
        let error = open_private(&pipe).expect_err("a pipe, which is not waited for");
        assert!(error.to_string().contains("regular"), "{error}");
        for mode in [0o620, 0o602] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("a mode");
            assert_eq!(open_private(&path).expect_err("writable").kind(), ErrorKind::PermissionDenied);
        }
        let _ = std::fs::remove_dir_all(folder);
    }
}
