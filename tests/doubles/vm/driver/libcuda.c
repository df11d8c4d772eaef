/* Test double of the CUDA driver library: its first call tells the errors that operators meet, computes nothing. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define NO_DEVICE 100
#define SYSTEM_DRIVER_MISMATCH 803
#define UNKNOWN 999
#define CARDS 248

static int count;

static int opens(const char *path)
{
	struct stat status;
	int file = open(path, O_RDWR | O_CLOEXEC);

	if (file < 0)
		return 0;
	/* A bind mount of a missing node leaves a plain file, which opens and is no device. */
	if (fstat(file, &status) || !S_ISCHR(status.st_mode)) {
		close(file);
		return 0;
	}
	close(file);
	return 1;
}

int cuInit(unsigned int flags)
{
	char text[256] = "", path[32];
	FILE *version = fopen("/proc/driver/nvidia/version", "r");

	if (!version || !opens("/dev/nvidiactl"))
		return NO_DEVICE;
	if (!fgets(text, sizeof(text), version) || !strstr(text, "  " NV_VERSION "  "))
		return SYSTEM_DRIVER_MISMATCH;
	fclose(version);
	count = 0;
	for (int minor = 0; minor < CARDS; minor++) {
		snprintf(path, sizeof(path), "/dev/nvidia%d", minor);
		count += opens(path);
	}
	if (!count)
		return NO_DEVICE;
	return opens("/dev/nvidia-uvm") ? 0 : UNKNOWN;
}

int cuDeviceGetCount(int *cards)
{
	*cards = count;
	return 0;
}

int cuDriverGetVersion(int *version)
{
	*version = 13000;
	return 0;
}
