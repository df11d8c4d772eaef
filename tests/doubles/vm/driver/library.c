/* Test double of a library of the driver that is there to be found: a file, a soname, a version. */
const char version_of_driver[] = NV_VERSION;
